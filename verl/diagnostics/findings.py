"""What the doctor says: findings, and the report of them as table and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "broken"]


@dataclass(frozen=True)
class Finding:
    """`fix` is one command, or one line to add to the run's; None where there is nothing to do."""

    name: str
    verdict: Verdict
    evidence: str
    fix: str | None = None


@dataclass(frozen=True, repr=False)
class EnvReport:
    """Findings that print as a table, also as the value of a notebook's cell.

    `exit_code` is 1 where something is broken.
    """

    findings: Sequence[Finding]

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "broken"]

    @property
    def exit_code(self) -> int:
        return 1 if self.broken else 0

    def to_json(self) -> str:
        count = {
            verdict: sum(f.verdict == verdict for f in self.findings)
            for verdict in ("ok", "warn", "broken")
        }
        return json.dumps(
            {**count, "findings": [asdict(finding) for finding in self.findings]}, indent=2
        )

    def __repr__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.verdict:<6}  {finding.name:<{width}}  {finding.evidence}")
            if finding.fix is not None:
                lines.append(f"{'':<6}  {'':<{width}}  $ {finding.fix}")
        warnings = sum(finding.verdict == "warn" for finding in self.findings)
        if self.broken:
            names = ", ".join(dict.fromkeys(finding.name for finding in self.broken))
            lines += [
                "",
                (
                    f"{len(self.broken)} broken ({names}), {warnings} to look at. Mend the first "
                    "one first."
                ),
            ]
        else:
            lines += ["", f"Nothing is broken, {warnings} to look at."]
        return "\n".join(lines)
