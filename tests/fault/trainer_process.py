"""A trainer as a process of its own, to be killed: `python trainer_process.py URL RUN JOURNAL GROUP_COUNT`.

It submits its groups under fixed names, consumes them in transactions of TAKEN_COUNT and publishes after each. It
writes to the journal, line by line and at once:

    begin
    group NAME redelivered|fresh
    end                             the transaction is over, its groups are acknowledged
    published VERSION
    done                            nothing of the run is left
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import rollfab

TAKEN_COUNT = 4
THINKING_S = 0.1  # per group, inside the transaction: where the test kills


def main(url: str, run_id: str, journal: Path, group_count: int) -> None:
    with rollfab.connect(url) as fabric, journal.open("a") as lines:

        def write(line: str) -> None:
            lines.write(line + "\n")
            lines.flush()
            os.fsync(lines.fileno())

        options = {"turns": 3, "pace_s": 0.02}
        run = fabric.run(run_id, model="tiny", environment="walk", environment_options=options)
        names = [f"step-{index}" for index in range(group_count)]
        run.submit([{"seed": index} for index in range(group_count)], group_size=3, group_ids=names)
        while run.status().depth:
            write("begin")
            with run.groups(timeout=1.0, count=TAKEN_COUNT) as groups:
                for group in groups:
                    assert len(group.rollouts) == 3, group
                    write(f"group {group.group_id} {'redelivered' if group.redelivered else 'fresh'}")
                    time.sleep(THINKING_S)
            write("end")
            weights = {name: tensor + 1e-3 for name, tensor in run.weights().items()}
            version = run.head_version() + 1
            run.publish(weights, version=version)
            write(f"published {version}")
        write("done")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
