"""The verb `run`."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from treewise.cli.options import GrammarOptions, ModelOptions, read_prompt, working
from treewise.cli.search import parse_settings
from treewise.config import SparsityOptions
from treewise.replicas.settings import FleetOptions

if TYPE_CHECKING:
    from treewise.replicas import Engines, Replicas

Program = Callable[..., Coroutine[Any, Any, Any]]


def run(
    program: str,
    /,
    *prompts: str,
    prompt_file: Annotated[Path | None, Parameter("--prompts")] = None,
    output: Path | None = None,
    set_values: Annotated[tuple[str, ...], Parameter("--set")] = (),
    chat: bool = False,
    seed: int = 0,
    in_flight: int = 64,
    ordered: bool = True,
    errors: Literal["raise", "keep"] = "keep",
    trees: bool = False,
    text: bool = False,
    ray: str | None = None,
    options: Annotated[ModelOptions | None, Parameter("*", group="Model and engine")] = None,
    sparsity: Annotated[SparsityOptions | None, Parameter("*", group="KV sparsity")] = None,
    fleet: Annotated[FleetOptions | None, Parameter("*", group="Replicas")] = None,
) -> None:
    """Run a program of your own over many prompts.

    What comes of each prompt is a line of JSON, with its place among the prompts, what the program returned and what it
    cost, or its error. Exit code 1 says that some have failed.

    Parameters
    ----------
    program
        A file with an async function of the root branch; where it has several, file.py:name says which, or it is called
        program. Or a ready-made program by name, as rollouts; `treewise strategies` lists them.
    prompts
        Texts; without any, and without a file of them, standard input is one.
    prompt_file
        A file of prompts: of JSON, a prompt a line, if its name ends in .jsonl: a text, token ids, messages, or an
        object with one of these as prompt or messages; else a text a line.
    output
        Write the lines to this file instead of standard output. What it has already is not computed again.
    set_values
        An argument of the program as key=value, the value JSON where it can be, e.g. --set widths=[4,2]; may be
        repeated.
    chat
        Put the prompts that are texts in the model's chat template.
    seed
        The same seed gives the same trees, in whatever order they are computed.
    in_flight
        The most prompts that are worked on at a time.
    ordered
        Write to standard output in the order of the prompts, or, with --no-ordered, as they end.
    errors
        keep: a prompt whose program raises has a line with the error; raise: it ends the run.
    trees
        Write the whole trees too.
    text
        Draw the trees as text on standard output, instead of lines.
    ray
        Run on replicas through Ray: local starts a cluster on this machine, auto or an address takes one that is there.
        --data-parallel-size says how many replicas.
    """
    function, arguments = find_program(program, parse_settings(set_values))
    if prompt_file is not None and prompts:
        raise ValueError("prompts: give texts or a file of them, not both")
    asked = list(prompts) if prompt_file is None else read_prompts(prompt_file)
    if not asked and prompt_file is None:
        asked = [read_prompt(None)]
    if chat:
        asked = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in asked]

    options, fleet = options or ModelOptions(), fleet or FleetOptions()
    if ray is not None:
        fleet = replace(fleet, ray_address=None if ray == "local" else ray)
    failed = 0
    with ExitStack() as stack:
        from treewise.replicas import map_programs
        from treewise.results import json_safe

        engines: Engines
        if ray is None and not fleet.are_wanted:
            engines = options.load(sparsity)
        else:
            with working(f"Starting {fleet.data_parallel_size} replicas of {options.model}"):
                engines = stack.enter_context(_replicas(function, options.parameters(sparsity), fleet))
        results = map_programs(
            function,
            asked,
            engines,
            seed=seed,
            output=output,
            in_flight=in_flight,
            ordered=ordered,
            errors=errors,
            trees=trees or text,
            **arguments,
        )
        for result in results:
            failed += result.error is not None
            if text:
                print(result.error if result.tree is None else result.tree.to_text())
            elif output is None:
                print(json.dumps(json_safe(result.to_dict())), flush=True)
    done = f"{len(asked) - failed:,} of {len(asked):,} prompts have a result"
    print(done if output is None else f"{output}: {done}", file=sys.stderr)
    if failed:
        sys.exit(1)


def _replicas(program: Program, llm: dict[str, Any], fleet: FleetOptions) -> Replicas:
    """Return replicas that need not have the file of a program, nor what it imports from its folder."""
    from treewise.replicas import Replicas

    made = Replicas(llm, fleet)
    if not program.__module__.startswith("treewise."):
        import cloudpickle

        folder = Path(inspect.getfile(program)).resolve().parent
        for module in list(sys.modules.values()):
            if (file := getattr(module, "__file__", None)) and Path(file).resolve().parent == folder:
                cloudpickle.register_pickle_by_value(module)
    return made


def find_program(name: str, arguments: Mapping[str, Any]) -> tuple[Program, dict[str, Any]]:
    """Return an async function of a file, or a ready-made one, and its arguments, checked.

    Raises
    ------
    ValueError
        If there is none of that name, there are several, or it does not take the arguments.
    """
    from treewise.search import STRATEGIES

    path, _, chosen = name.partition(".py:")
    if (entry := STRATEGIES.get(name.replace("-", "_"))) is not None:
        entry.build(**arguments)  # raises where it has no such argument
        grammars = {key: GrammarOptions.read(arguments[key]) for key in entry.grammars if arguments.get(key)}
        return entry.program, {**arguments, **grammars}
    file = Path(f"{path}.py" if chosen else name)
    if file.suffix != ".py":
        raise ValueError(f"program: {name!r} is neither a file, as program.py, nor one of {', '.join(STRATEGIES)}")
    if not file.is_file():
        raise ValueError(f"program: there is no file {file}")
    program = _function(file, chosen)
    try:
        inspect.signature(program).bind(None, **arguments)
    except TypeError as error:
        raise ValueError(f"set: {program.__name__}{inspect.signature(program)}: {error}") from None
    return program, dict(arguments)


def _function(file: Path, chosen: str) -> Program:
    """Import a file, as Python does a script but under its own name, and return its program."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    own: dict[str, Program] = {
        name: value
        for name, value in vars(module).items()
        if inspect.iscoroutinefunction(value) and value.__module__ == module.__name__
    }
    if not chosen:
        chosen = next(iter(own)) if len(own) == 1 else "program"
    if chosen not in own:
        known = ", ".join(own) or "none"
        raise ValueError(f"program: {file} has no async function {chosen!r}; it has {known}; give {file}:NAME")
    return own[chosen]


def read_prompts(file: Path) -> list[Any]:
    """Read a file of prompts, one a line; empty lines are none.

    Raises
    ------
    ValueError
        If a line of JSON is no prompt.
    """
    lines = [(number, line) for number, line in enumerate(file.read_text("utf-8").splitlines(), 1) if line.strip()]
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompt = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"prompts: line {number} of {file} is no JSON: {error}") from None
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt", prompt.get("messages"))
        if not isinstance(prompt, str | list):
            raise ValueError(
                f"prompts: line {number} of {file} is neither a text, token ids nor messages, nor has it one of these "
                "as prompt or messages"
            )
        prompts.append(prompt)
    return prompts
