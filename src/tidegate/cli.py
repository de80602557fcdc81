"""The command line: `tidegate doctor`."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tidegate
from tidegate.sizes import format_size

__all__ = ["main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidegate {tidegate.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Training on the memory you have."""


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; sizes in bytes, rates in GB/s.")
    ] = False,
    path: Annotated[list[str] | None, typer.Option(help="Directory to examine; may be given several times.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the measurements out.")] = False,
) -> None:
    """Shows what this machine can do, measured, with a remedy for each problem.

    Exits with 0 when all is good, 1 when there are problems, 2 on wrong use.
    """
    from tidegate.doctor import examine

    log = logging.getLogger("tidegate")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it would log stands in the report
    try:
        report = examine(tuple(path or ()), quick=quick)
    finally:
        log.setLevel(level)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report.ok else 1)


def _show(report: Any) -> None:
    console = Console()
    for title, rows in report.tables.items():
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(escape(name), escape(_text(value)))
        if rows:
            console.print(table)
    for finding in report.findings:
        what, remedy = escape(finding.what), escape(finding.remedy)
        console.print(f"[bold red]problem[/] {what}\n  [green]remedy[/] {remedy}", highlight=False, soft_wrap=True)
    if report.ok:
        console.print("[bold green]no problems found[/]")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if value is None:
        return "none"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024:
        return format_size(value)
    return str(value)


def main() -> None:
    """Entry point of the `tidegate` command."""
    app()
