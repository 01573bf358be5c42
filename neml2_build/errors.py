"""Errors that a user can cause or mend: one message with file, line, target, reason and remedy; never a traceback."""

from __future__ import annotations

from pathlib import Path


class BuildError(Exception):
    """Something went wrong that its reader can act on.

    Parameters
    ----------
    message
        What was wrong, in one sentence without a full stop.
    file, line
        Where, as far as it is known. *line* counts from 1.
    target, stage
        Which target and stage was being made.
    remedy
        What to do about it.
    log
        Path of the full output of the failed job.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        file: Path | str | None = None,
        line: int | None = None,
        target: str | None = None,
        stage: str | None = None,
        remedy: str | None = None,
        log: Path | str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = str(file) if file is not None else None
        self.line = line
        self.target = target
        self.stage = stage
        self.remedy = remedy
        self.log = str(log) if log is not None else None

    def __reduce__(self):
        fields = ("file", "line", "target", "stage", "remedy", "log")
        return _rebuild, (type(self), self.message, {name: getattr(self, name) for name in fields})

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        task = f"[{self.stage}:{self.target}] " if self.stage and self.target else f"[{self.target}] " if self.target else ""
        text = f"{where}{task}{self.message}"
        if self.remedy:
            text += f"\n  remedy: {self.remedy}"
        if self.log:
            text += f"\n  full log: {self.log}"
        return text


def _rebuild(cls: type[BuildError], message: str, fields: dict) -> BuildError:
    return cls(message, **fields)


class RequestError(BuildError):
    """The request or the manifest is wrong: nothing was started. Exit code 2."""

    exit_code = 2


class TaskError(BuildError):
    """A task failed; others may have succeeded. Exit code 1."""
