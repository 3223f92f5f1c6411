"""Findings of the doctor, and the report of them as a table and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "broken"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    `fix` is one command, or one line to add to the run's; None: nothing to do.
    """

    name: str
    verdict: Verdict
    evidence: str
    fix: str | None = None


Findings = Iterator[Finding]


@dataclass(frozen=True, repr=False)
class EnvReport:
    """Findings that print as a table, also as the value of a notebook's cell.

    `exit_code` is 1 where something is broken.
    """

    findings: Sequence[Finding]

    @property
    def broken(self) -> list[Finding]:
        """Findings that stop a run."""
        return [finding for finding in self.findings if finding.verdict == "broken"]

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 where something is broken."""
        return 1 if self.broken else 0

    def to_json(self) -> str:
        """Return the number of findings by verdict, and the findings."""
        content: dict[str, object] = {}
        for verdict in ("ok", "warn", "broken"):
            content[verdict] = sum(finding.verdict == verdict for finding in self.findings)
        content["findings"] = [asdict(finding) for finding in self.findings]
        return json.dumps(content, indent=2)

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
            count = f"{len(self.broken)} broken ({names}), {warnings} to look at"
            lines += ["", f"{count}. Fix the first one first."]
        else:
            lines += ["", f"Nothing is broken, {warnings} to look at."]
        return "\n".join(lines)
