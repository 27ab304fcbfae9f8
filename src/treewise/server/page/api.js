/** The server's HTTP interface: JSON, streams of server-sent events, and the API key of this tab. */

const KEY = "treewise-api-key";
const BROKEN = "The answer broke off: the connection to the server was lost.";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An answer that is no success; `status` is 0 where the stream itself carried the error. */
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers }).catch(unlessAborted("The server cannot be reached."));
  if (!response.ok) {
    const body = await response.text();
    throw new Refused(message(body) || `The server answered ${response.status}.`, response.status);
  }
  return response;
}

/** What browsers say of a lost connection helps nobody; that someone stopped a request is told as it is. */
function unlessAborted(words) {
  return (error) => {
    throw error instanceof TypeError ? new Refused(words) : error;
  };
}

function message(body) {
  try {
    const content = JSON.parse(body);
    return content.error?.message ?? content.detail ?? content.message ?? body;
  } catch {
    return body;
  }
}

export const getJSON = async (path, signal) => (await request(path, { signal })).json();

/** Yield the chunks of a streamed answer. */
export async function* stream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message ?? String(chunk.error));
    yield chunk;
  }
  throw new Refused(BROKEN);
}

/** Yield the data of each server-sent event. */
async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(unlessAborted(BROKEN));
      if (done) return;
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The same request for a shell. The key stays here: the command reads it from the environment. */
export function curl(path, body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const access = key.get() ? ' -H "Authorization: Bearer $TREEWISE_API_KEY"' : "";
  return `curl -N ${new URL(path, document.baseURI)} -H 'Content-Type: application/json'${access} -d '${quoted}'`;
}
