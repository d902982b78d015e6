"""`foregrad cache ls|verify|clear|path`: the files of `compile` on disk."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import Any

from foregrad.config import config
from foregrad.graph.source import shown
from foregrad.store.cache.keeper import store_of
from foregrad.store.cache.store import Store, StoredEntry

from .screen import add_json, print_json


def add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "cache",
        help="the results that `compile` keeps on disk",
        description="Lists, checks or removes the results that `foregrad.compile` keeps on disk for the next "
        "process, in the folder that FOREGRAD_CACHE_DIR names. Inductor's own caches are elsewhere, and "
        "stay. Exit status: 0, 1 a damaged entry (`verify`), or a folder that other users may write to.",
        epilog="example: foregrad cache ls",
    )
    actions = {
        "ls": "list the entries, most recently used first",
        "verify": "read every entry; exit status 1 when one is damaged",
        "clear": "remove every entry",
        "path": "print the folder",
    }
    parser.add_argument("action", choices=list(actions), help="; ".join(f"{k}: {v}" for k, v in actions.items()))
    add_json(parser)
    parser.set_defaults(run=run_cache)


def store_here() -> Store:
    """The cache that the settings name."""
    return store_of(config.value)


def run_cache(options: argparse.Namespace) -> int:
    """Run the command; 1 when the folder may not be used, or an entry is damaged."""
    store = store_here()
    findings: dict[str, Any] = {"folder": store.folder}
    refused = None if options.action == "path" else store.refused()
    if refused is not None:
        print(f"foregrad cache: {refused}", file=sys.stderr)
        return 1
    if options.action == "path":
        text = store.folder
    elif options.action == "clear":
        findings["removed"] = store.clear()
        text = f"{_counted(findings['removed'])} removed from {store.folder}"
    else:
        entries = store.entries()
        damaged = sum(entry.fault is not None for entry in entries)
        is_check = options.action == "verify"
        listed = [entry for entry in entries if entry.fault is not None or not is_check]
        findings |= {
            "entries": [dataclasses.asdict(entry) for entry in listed],
            "count": len(entries),
            "damaged": damaged,
            "nbytes": sum(entry.nbytes for entry in entries),
            "limit": store.limit,
        }
        end = f", {damaged} damaged" if damaged else ", all of them whole" if is_check else ""
        size = f"{findings['nbytes'] / (1 << 20):.1f} MiB of {store.limit >> 20}"
        text = "\n".join([*map(_line, listed), f"{_counted(len(entries))}, {size}{end}, in {store.folder}"])
    print_json(findings) if options.json else print(text)
    return 1 if options.action == "verify" and findings["damaged"] else 0


def _line(entry: StoredEntry) -> str:
    start = f"{entry.key[:16]}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.used))}  {entry.nbytes:>9}"
    if entry.fault is not None:
        return f"{start}  {shown(entry.fault)}"
    about = entry.about
    nodes = "+".join(map(str, about.get("nodes", ())))
    versions = f"foregrad {about.get('foregrad')}, PyTorch {about.get('torch')}"
    return (
        f"{start}  {shown(str(about.get('name')))}: {shown(str(about.get('what')))}, {nodes} nodes, {shown(versions)}"
    )


def _counted(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
