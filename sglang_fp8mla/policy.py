"""Which path when: a measured table per GPU generation, and the choice made from it.

The choice is a pure function of the table, the facts, the settings and what the probes found, so
all ranks agree without a word to each other. Tables are data (JSON), read with a schema check.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import Check
from .envs import Settings
from .errors import IncompatibleEnvironment, InvalidArgument
from .probe import DECODE, EXTEND, Facts

FALLBACK = "gather_cast"
SCHEMA = 1
_SHIPPED = Path(__file__).with_name("profile.json")
_PATHS = {DECODE: ("fused", "native", "gather_cast"), EXTEND: ("native", "gather_cast")}


@dataclass(frozen=True)
class Rule:
    """`path` is fastest for batches of at most `max_batch` requests with at most `max_heads`."""

    max_heads: int
    max_batch: int
    path: str


@dataclass(frozen=True)
class Profile:
    """The measured rules of one GPU generation; `source` says where they come from."""

    source: str
    decode: tuple[Rule, ...]
    extend: tuple[Rule, ...]

    def rules(self, phase: str) -> tuple[Rule, ...]:
        return self.decode if phase == DECODE else self.extend


@dataclass(frozen=True)
class Choice:
    """How one phase attends: (max_batch, path) in rising order, and why."""

    phase: str
    by_batch: tuple[tuple[int, str], ...]
    reason: str
    checks: tuple[Check, ...] = ()

    def path(self, bs: int) -> str:
        """The path for a batch of `bs` requests; the last one also beyond its bound."""
        for max_batch, path in self.by_batch:
            if bs <= max_batch:
                return path
        return self.by_batch[-1][1]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that the phase may take, without repetition."""
        return tuple(dict.fromkeys(path for _, path in self.by_batch))

    def __str__(self) -> str:
        if len(self.by_batch) == 1:
            return self.by_batch[0][1]
        return ", ".join(f"{path} to batch {limit}" for limit, path in self.by_batch)


@dataclass(frozen=True)
class Decision:
    """The choice for both phases."""

    decode: Choice
    extend: Choice

    def uses(self, path: str) -> bool:
        return path in self.decode.paths or path in self.extend.paths


def load_profile(facts: Facts, settings: Settings) -> Profile | None:
    """The rules for this GPU generation, or None where nobody has measured it.

    Raises:
        InvalidArgument: the file that SGLANG_FP8MLA_PROFILE names is missing, damaged, of another
            schema, or has no rules for this generation.
    """
    path = Path(settings.profile) if settings.profile else _SHIPPED
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{_where(path)} must be a JSON table of `sglang-fp8mla calibrate`: {error}"
        ) from error
    return _parse(data, facts, path, required=bool(settings.profile))


def _where(path: Path) -> str:
    return f"SGLANG_FP8MLA_PROFILE {path}"


def _parse(data: Any, facts: Facts, path: Path, *, required: bool) -> Profile | None:
    def refuse(what: str) -> InvalidArgument:
        return InvalidArgument(f"{_where(path)} {what}; remake it with `sglang-fp8mla calibrate`")

    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise refuse(f"must have schema {SCHEMA}")
    generations = data.get("generations")
    if not isinstance(generations, dict):
        raise refuse("must have an object `generations`")
    entry = generations.get(facts.sm)
    if entry is None:
        if required:
            raise refuse(f"must hold rules for {facts.sm}, got {sorted(generations)}")
        return None

    def rules(phase: str) -> tuple[Rule, ...]:
        found = []
        for item in entry.get(phase, []):
            rule = Rule(**item)
            if rule.path not in _PATHS[phase] or rule.max_heads < 1 or rule.max_batch < 1:
                raise refuse(f"must hold rules with a path of {_PATHS[phase]}, got {item}")
            found.append(rule)
        if not found:
            raise refuse(f"must hold rules for {phase}")
        return tuple(found)

    try:
        return Profile(str(entry.get("source", path.name)), rules(DECODE), rules(EXTEND))
    except (TypeError, AttributeError) as error:
        raise refuse(f"must hold rules of max_heads, max_batch and path ({error})") from error


def choose(
    facts: Facts, settings: Settings, probe: Callable[[str, str], Check]
) -> tuple[Decision, list[Check]]:
    """Choose a path for each phase.

    Args:
        facts: GPU, model and pool.
        settings: the environment.
        probe: (path, phase) -> Check; called only for paths that the choice hangs on.

    Returns:
        The decision, and every check that it rests on.

    Raises:
        IncompatibleEnvironment: a forced path cannot run, or not even the fallback can.
        InvalidArgument: the profile is unusable.
    """
    profile = load_profile(facts, settings)
    checks: list[Check] = []

    def probed(path: str, phase: str) -> Check:
        check = probe(path, phase)
        checks.append(check)
        return check

    decode = _choose_phase(DECODE, settings.decode_path, facts, profile, probed)
    extend = _choose_phase(EXTEND, settings.extend_path, facts, profile, probed)
    return Decision(decode, extend), checks


def _choose_phase(
    phase: str,
    wanted: str,
    facts: Facts,
    profile: Profile | None,
    probe: Callable[[str, str], Check],
) -> Choice:
    everything = 1 << 30
    if wanted != "auto":
        variable = f"SGLANG_FP8MLA_{phase.upper()}_PATH"
        check = probe(wanted, phase)
        if not check.ok:
            raise IncompatibleEnvironment(
                f"{variable}={wanted} cannot run here: {check}; unset {variable}, or set it to auto"
            )
        return Choice(phase, ((everything, wanted),), f"forced by {variable}; {check}", (check,))
    if profile is None:
        steps = [(everything, FALLBACK)]
        reason = f"no measured table for {facts.device_name} ({facts.sm})"
    else:
        rules = [rule for rule in profile.rules(phase) if facts.num_heads <= rule.max_heads]
        # the narrowest head class that fits; its rules by batch
        heads = min((rule.max_heads for rule in rules), default=0)
        rules = [rule for rule in rules if rule.max_heads == heads]
        steps = [(r.max_batch, r.path) for r in sorted(rules, key=lambda r: r.max_batch)]
        steps = steps or [(everything, FALLBACK)]
        reason = f"fastest when measured ({profile.source})"
    kept: list[tuple[int, str]] = []
    seen: dict[str, Check] = {}
    for limit, path in steps:
        if path not in seen:
            seen[path] = probe(path, phase)
        if not seen[path].ok and path != FALLBACK:
            reason = f"{path} is fastest when measured but failed its check: {seen[path]}"
            path = FALLBACK
            if path not in seen:
                seen[path] = probe(path, phase)
        if not seen[path].ok:
            raise IncompatibleEnvironment(
                f"{phase}: no path can run here: {'; '.join(map(str, seen.values()))}"
            )
        if kept and kept[-1][1] == path:
            kept.pop()
        kept.append((limit, path))
    return Choice(phase, tuple(kept), reason, tuple(seen.values()))
