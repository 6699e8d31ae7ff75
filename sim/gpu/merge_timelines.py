"""Puts the timelines of several processes into one file: python sim/gpu/merge_timelines.py OUT [NAME=]IN
...

With a NAME, such as "rank 0", a process is called so. Times begin at zero. A file whose process was killed
lacks its end: what is whole in it is taken.
"""

import json
import sys


def read(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # one event a line, each but the first after a comma
        lines = text.splitlines()[1:]
        events = []
        for line in lines:
            try:
                events.append(json.loads(line.rstrip(",")))
            except json.JSONDecodeError:
                break
        return events


def merge(inputs):
    """[(name or None, events)] -> events"""
    first = min((e["ts"] for _, events in inputs for e in events if "ts" in e), default=0)
    merged = []
    for name, events in inputs:
        for event in events:
            if "ts" in event:
                event = {**event, "ts": round(event["ts"] - first, 3)}
            elif name and event["name"] == "process_name":
                event = {**event, "args": {"name": name}}
            merged.append(event)
    return merged


def main(arguments):
    if len(arguments) < 2 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    inputs = []
    for argument in arguments[1:]:
        name, _, path = argument.rpartition("=")
        inputs.append((name or None, read(path)))
    with open(arguments[0], "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(event) for event in merge(inputs)) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
