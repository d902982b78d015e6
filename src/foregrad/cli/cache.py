"""`foregrad cache ls|verify|clear|path`: what `compile` keeps on disk."""

from __future__ import annotations

import argparse
import sys
import time

from foregrad.cache.keeper import store_of
from foregrad.cache.store import Entry, Store
from foregrad.config import config
from foregrad.graph.spelling import shown

__all__ = ["add_cache", "run_cache"]


def add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "cache",
        help="what `compile` keeps on disk",
        description="Lists, checks or removes what `foregrad.compile` keeps on disk for the next process, in the "
        "folder that FOREGRAD_CACHE_DIR names. Inductor's own caches are elsewhere, and stay.",
        epilog="example: foregrad cache ls",
    )
    actions = {
        "ls": "list the entries, those used last first",
        "verify": "read every entry; exit status 1 when one is damaged",
        "clear": "remove every entry",
        "path": "print the folder",
    }
    parser.add_argument("action", choices=list(actions), help="; ".join(f"{k}: {v}" for k, v in actions.items()))
    parser.set_defaults(run=run_cache)


def run_cache(options: argparse.Namespace) -> int:
    """Run the command; 1 when the folder may not be used, or an entry is damaged."""
    store = store_of(config.value)
    if options.action == "path":
        print(store.folder)
        return 0
    refused = store.refused()
    if refused is not None:
        print(f"foregrad cache: {refused}", file=sys.stderr)
        return 1
    if options.action == "clear":
        print(f"{_counted(store.clear())} removed from {store.folder}")
        return 0
    return _list(store, only_faults=options.action == "verify")


def _list(store: Store, *, only_faults: bool) -> int:
    entries = store.entries()
    faulty = [entry for entry in entries if entry.fault is not None]
    for entry in faulty if only_faults else entries:
        print(_line(entry))
    total = sum(entry.nbytes for entry in entries) / (1 << 20)
    end = f", {len(faulty)} damaged" if faulty else ", all of them whole" if only_faults else ""
    print(f"{_counted(len(entries))}, {total:.1f} MiB of {store.limit >> 20}{end}, in {store.folder}")
    return 1 if faulty and only_faults else 0


def _line(entry: Entry) -> str:
    start = f"{entry.key[:16]}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.used))}  {entry.nbytes:>9}"
    if entry.fault is not None:
        return f"{start}  {shown(entry.fault)}"
    about = entry.about
    nodes = "+".join(map(str, about.get("nodes", ())))
    made = f"foregrad {about.get('foregrad')}, PyTorch {about.get('torch')}"
    return f"{start}  {shown(str(about.get('name')))}: {shown(str(about.get('what')))}, {nodes} nodes, {shown(made)}"


def _counted(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
