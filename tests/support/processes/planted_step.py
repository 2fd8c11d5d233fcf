"""A step of the acceptance run on a GPU that passes, fails, hangs, or says that it has nothing to show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def main(how: str, directory: Path) -> None:
    with (directory / "begun").open("a") as begun:
        begun.write(f"{how}\n")
    print("a line of no meaning")
    if how in ("hang", "stay"):
        print('figures: {"before": 1}', flush=True)
        below = subprocess.Popen(SLEEP, start_new_session=True, env={} if how == "hang" else None)  # as a broker's
        (directory / "own").write_text(str(os.getpid()))
        (directory / "below").write_text(str(below.pid))
        time.sleep(600)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (directory / "below").write_text("0")
        time.sleep(600)
    if how == "fail":
        raise ValueError("planted")
    if how == "skip":
        print("skipped: nothing to show")
    if how == "pass":
        print('figures: {"first": 1}')
        print('figures: {"second": 2.5}')


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
