"""Prompts of four classes, in which more or less of the answer stands in the prompt already."""

from __future__ import annotations

_HARBOUR = """\
The harbour of Brennick was built twice. The first harbour, finished in 1841, had one long pier of oak that ran
straight out from the fish market. In the winter of 1867 a storm from the north-east broke the pier in three places,
and the harbour filled with sand within a year. The fishing boats moved to the next village, and most of the
families followed them. For almost twenty years the market hall stood empty.

The second harbour was the work of Agnes Lorne, who had grown up in the village and studied engineering abroad. She
noticed that the sand came from the cliffs to the north, and that the current carried it along the shore at a steady
pace. Instead of one pier that caught the sand, she planned two curved walls of stone that let the current pass. The
council thought the plan too expensive and refused it twice. In 1884 Agnes Lorne paid for the first forty metres of
the northern wall herself, with money that she had earned by building a railway bridge. When the council saw that no
sand gathered behind the wall, it paid for the rest. The second harbour was opened in June 1889, and the market hall
was full of fish again by the end of the summer.

Today the two walls are still in use. The northern wall was raised by half a metre in 1953, and the lamps at both
ends run on electricity. Every June the village celebrates the opening with a race of rowing boats from one wall to
the other. The fish market is smaller than it was, but the market hall now holds a museum, and in its first room
hangs the plan that the council refused twice."""

_BEES = """\
A colony of honey bees decides where to live by a vote. In late spring, when the hive is crowded, the old queen
leaves with about ten thousand workers and settles on a branch nearby. From there a few hundred of the oldest
workers, the scouts, fly out to look for hollow trees. A good hollow has a volume of about forty litres, a small
entrance that faces south, and a floor that is dry. A scout that finds a hollow walks around in it for half an hour
and measures it with her steps.

When she comes back to the branch, the scout dances. The direction of the dance shows the direction of the hollow,
the length of the dance shows how far away it is, and the number of times she repeats the dance shows how good she
thinks it is. Other scouts follow the dance, visit the hollow themselves, and dance for it too if they like it.
Every scout dances a little less each time she comes back, so that a hollow which no new scout likes is soon
forgotten. Good hollows win more scouts than poor ones, and after a day or two almost all dances are for one hollow.

The decision is not made on the branch, however, but at the hollow itself. As soon as about thirty scouts are there
at the same time, they return to the branch and make a high piping sound. The piping tells the ten thousand workers
to warm up their flight muscles. An hour later the whole swarm takes off, and the scouts lead it to the new home by
flying quickly through the middle of the swarm in the right direction. Swarms nearly always choose the best hollow
that any of their scouts has found."""

_QUEUE = '''\
class Queue:
    """A queue of jobs that wait for a worker."""

    def __init__(self, limit):
        self.limit = limit
        self.jobs = []
        self.finished = 0

    def add_job(self, job):
        """Put a job at the end of the queue."""
        if len(self.jobs) >= self.limit:
            raise ValueError("the queue is full")
        self.jobs.append(job)

    def next_job(self):
        """Take the first job out of the queue."""
        if not self.jobs:
            return None
        job = self.jobs.pop(0)
        self.finished += 1
        return job

    def cancel_job(self, name):
        """Take a job out of the queue by its name."""
        for job in self.jobs:
            if job.name == name:
                self.jobs.remove(job)
                return True
        return False

    def is_empty(self):
        """Tell whether no job is waiting."""
        return len(self.jobs) == 0

    def report(self):
        """Say how many jobs are waiting and how many are finished."""
        return f"{len(self.jobs)} jobs waiting, {self.finished} jobs finished"
'''

_SHAPES = '''\
import math


def area_of_circle(radius):
    """Return the area of a circle."""
    if radius < 0:
        raise ValueError("the radius must not be negative")
    return math.pi * radius * radius


def area_of_square(side):
    """Return the area of a square."""
    if side < 0:
        raise ValueError("the side must not be negative")
    return side * side


def area_of_rectangle(width, height):
    """Return the area of a rectangle."""
    if width < 0:
        raise ValueError("the width must not be negative")
    if height < 0:
        raise ValueError("the height must not be negative")
    return width * height


def area_of_triangle(base, height):
    """Return the area of a triangle."""
    if base < 0:
        raise ValueError("the base must not be negative")
    if height < 0:
        raise ValueError("the height must not be negative")
    return base * height / 2
'''

PROMPTS: dict[str, list[str]] = {
    "summarise": [
        f"Summarise the following text by its most important sentences, word for word.\n\n{text}"
        for text in (_HARBOUR, _BEES)
    ],
    "edit": [
        f"Copy the following text, and replace {old} by {new} everywhere. Change nothing else.\n\n{text}"
        for text, old, new in ((_HARBOUR, "Brennick", "Tolmouth"), (_BEES, "hollow", "cave"))
    ],
    "code": [
        f"{task} Write down the whole program again.\n\n```python\n{program}```"
        for task, program in (
            ("Rename the class Queue to WaitingLine.", _QUEUE),
            ("Add a function area_of_trapezoid at the end of this program.", _SHAPES),
        )
    ],
    "chat": [
        "What should I think of when I plan a week of walking in the mountains with two children?",
        "Why do people in some countries drive on the left side of the road and in others on the right?",
    ],
}
"""By class: texts whose answers quote the prompt, copy it with changes, do so with programs, and are free."""
