"""Runs co-serving by our own bench: serving alone, rollouts beside it without a guard, and with ours.

What a guard is worth is read from P99 of both latencies and from the tokens that rollouts made, arm by arm; how well it
knows the device, from the error of its predictions.
"""

from __future__ import annotations

from typing import Any

from tests.bench.coserve.main import Settings, measure

from .pairs import pair_sizes
from .telling import tell

ARMS = ("alone", "share-all", "ours")


def main() -> None:
    with pair_sizes() as (told, sizes):
        settings = Settings(
            rate_per_s=6.0 if told.is_tiny else 8.0,
            request_count=24 if told.is_tiny else 360,
            round_count=1,
            slice_count=1,
            spoiled_max=0,
            calibration_count=1,
            warm_count=0,
            arms=("alone", "ours") if "--mps-threads" in sizes.borrowed_words else ARMS,
            sizes=sizes,
        )
        report = measure(settings, lambda text: print(text, flush=True))
    failed = {name: arm["requests_failed"] for name, arm in report.baselines.items()}
    tell(slo=report.params["slo"], arms={name: _brief(arm) for name, arm in report.baselines.items()})
    assert not any(failed.values()), f"requests to the serving engine failed: {failed}"


def _brief(arm: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one arm that matter here."""
    keys = "requests", "violations", "ttft_tax_p99", "tpot_tax_p99", "step_error_p50", "step_error_p95"
    latencies = {name: arm[name]["p99_of_all"] for name in ("ttft_ms", "tpot_ms")}
    return {**{key: arm[key] for key in keys}, **latencies, "tokens_per_s": arm["tokens_per_s"]["borrowed"]["median"]}


if __name__ == "__main__":
    main()
