"""Coverage-guided fuzzing with atheris (`pip install rollfab[fuzz]`) of the targets in targets.py.

    python tests/fuzz/fuzz_wire.py -runs=100000          or -max_total_time=60; further words go to libFuzzer

The first byte of an input chooses the target, so one process covers a group of them. A finding is an exception that the
target does not declare: it is printed with its traceback, and its input is kept as crash-<hash>, to be repeated with
`python tests/fuzz/fuzz_wire.py crash-<hash>`. Findings become tests in tests/unit/fabric/format/test_fuzz_decoders.py.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INPUT_BYTES_MAX = 4096


def fuzz(*names: str) -> None:
    """Fuzz these targets until libFuzzer has done what its options say."""
    import atheris

    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    with atheris.instrument_imports(include=["rollfab"]):
        from tests.fuzz.targets import TARGETS, attack

    targets = [TARGETS[name] for name in names or sorted(TARGETS)]

    def one_input(data: bytes) -> None:
        if data:
            attack(targets[data[0] % len(targets)], data[1:])

    prefix = "rollfab-fuzz-"
    with tempfile.TemporaryDirectory(prefix=prefix) as corpus, tempfile.TemporaryDirectory(prefix=prefix) as words:
        _write_seeds(Path(corpus), (target.seeds for target in targets))
        _write_dictionary(Path(words), (target.seeds for target in targets))
        own = [word for word in sys.argv[1:] if not word.startswith("-")]
        options = [f"-max_len={INPUT_BYTES_MAX}", f"-dict={words}/words", *sys.argv[1:]]
        atheris.Setup([sys.argv[0], *options, *([] if own else [corpus])], one_input)
        atheris.Fuzz()


def _write_seeds(corpus: Path, groups: Iterable[tuple[bytes, ...]]) -> None:
    for choice, seeds in enumerate(groups):
        for number, seed in enumerate(seeds):
            (corpus / f"{choice}-{number}").write_bytes(bytes([choice]) + seed)


def _write_dictionary(folder: Path, groups: Iterable[tuple[bytes, ...]]) -> None:
    """Names and JSON's own words: what no mutation of single bytes comes upon."""
    found = {word for seeds in groups for seed in seeds for word in re.findall(rb"[A-Za-z_]{3,20}", seed)}
    lines = [f'"{word.decode()}"\n' for word in sorted(found | {b"null", b"true", b"false"})]
    lines += [f'"{word}"\n' for word in ("[]", "{}", "-1", "1e308", "9223372036854775808", r"\"\"", r"\"i4\"")]
    (folder / "words").write_text("".join(lines))
