"""Modes: a name, an environment and extra script arguments; and their syntax on the command line."""

import dataclasses
import difflib
import re
import shlex


class ModeError(ValueError):
    """A mode with a syntax error; the message shows the right form."""


@dataclasses.dataclass(frozen=True)
class Mode:
    name: str
    env: dict
    args: tuple = ()

    @property
    def wants_fcdp(self):
        return self.env.get("FCDP", "0") not in ("", "0")


BUILT_IN = (Mode("fsdp", {}), Mode("fcdp", {"FCDP": "1"}))
_FORM = "write 'NAME: KEY=VALUE ... -- SCRIPT ARGUMENTS', e.g. 'hpz: -- --reshard-after-forward 2'"


def parse_setting(text):
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key):
        raise ModeError(f"{text!r} is not KEY=VALUE")
    return key, value


def parse_mode(text):
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon and name in (mode.name for mode in BUILT_IN):
        raise ModeError(f"mode {name!r} is built in: --modes {name} runs it; to define another, {_FORM}")
    if not colon or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ModeError(f"mode {text!r}: {_FORM}")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ModeError(f"mode {name!r}: {error}; {_FORM}") from error
    cut = words.index("--") if "--" in words else len(words)
    try:
        env = dict(parse_setting(word) for word in words[:cut])
    except ModeError as error:
        raise ModeError(f"mode {name!r}: {error} (script arguments go after --); {_FORM}") from error
    return Mode(name, env, tuple(words[cut + 1 :]))


def select(names, definitions):
    """The modes to run, in order: those of --modes, then those that --mode defined and --modes did not place."""
    defined = {mode.name: mode for mode in BUILT_IN}
    own = [parse_mode(text) for text in definitions]
    for mode in own:
        if mode.name in defined:
            raise ModeError(f"mode {mode.name!r} is defined twice (fsdp and fcdp are built in)")
        defined[mode.name] = mode
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    chosen += [mode.name for mode in own if mode.name not in chosen]
    for name in chosen:
        if name not in defined:
            near = difflib.get_close_matches(name, defined, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ModeError(f"unknown mode {name!r}: {meant}there are {', '.join(defined)}; --mode defines others")
        if chosen.count(name) > 1:
            raise ModeError(f"mode {name!r} is listed twice; --repeat N runs every mode N times")
    if not chosen:
        raise ModeError("no mode to run: give --modes fsdp,fcdp or a --mode")
    return [defined[name] for name in chosen]
