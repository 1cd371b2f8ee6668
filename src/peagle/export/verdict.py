"""What the gate says: every check with what it found, and the first that failed."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Engine = Literal["native", "vllm"]
Status = Literal["pass", "FAIL", "warning", "not checked", "not reached"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found and, where it is wrong, the likely cause."""

    name: str
    status: Status
    found: str
    cause: str | None = None


@dataclass(frozen=True)
class Verdict:
    engine: Engine
    checks: tuple[Check, ...]

    @property
    def failure(self) -> Check | None:
        return next((check for check in self.checks if check.status == "FAIL"), None)

    @property
    def passed(self) -> bool:
        return self.failure is None

    @property
    def unchecked(self) -> list[str]:
        return [check.name for check in self.checks if check.status == "not checked"]

    def to_json(self) -> dict[str, Any]:
        failure = self.failure
        return {
            "engine": self.engine,
            "passed": self.passed,
            "first_difference": None if failure is None else asdict(failure),
            "not_checked": self.unchecked,
            "checks": [asdict(check) for check in self.checks],
        }
