"""Bounds how large anything may be: one table, applied where a thing is made and again where it is read.

- Making something above its limit raises PayloadTooLarge, which names the thing, its size, the limit and what to do.
- A reader refuses something above its limit before parsing it: no sender can make a reader allocate at will.
- The limits guard processes and the broker against accidents and ill will; they are far above what a run needs.

Counts of things (trajectories of a run, events kept, …) are bounded by their owners; fabric/queue/keys.py lists those.
"""

from __future__ import annotations

from .errors import PayloadTooLarge

KIB, MIB = 1 << 10, 1 << 20

TASK_BYTES_MAX = MIB  # as JSON; travels once per trajectory and once per group
GROUP_SIZE_MAX = 10_000  # trajectories pushed by one script, which holds the broker meanwhile (about 20 ms)
PROMPT_TOKENS_MAX = MIB  # of one turn: the whole context; longer than any model's
OBSERVATION_BYTES_MAX = MIB  # as UTF-8: four bytes for each token of a context of 262,144; tokenised in a second
OBSERVATION_IMAGES_BYTES_MAX = 4 * MIB  # of its images as base64, beside its text: 3 MiB of files
INFO_BYTES_MAX = MIB  # as JSON, of one step; the last one travels with its rollout
SNAPSHOT_BYTES_MAX = 8 * MIB  # as JSON; written once per turn
SNAPSHOTS_BYTES_MAX = 256 * MIB  # of memory, for all snapshots that one agent is saving or restoring
WORLD_MEMORY_BYTES_MAX = 4096 * MIB  # that an environment's process may write to
EVENT_BYTES_MAX = 64 * KIB  # as JSON; ten thousand are kept
HTTP_BODY_BYTES_MAX = 8 * MIB  # a context of PROMPT_TOKENS_MAX as text
KEYS_FILE_BYTES_MAX = MIB  # some thousand keys of the api
SHARD_COUNT_MAX = 1024  # of a run: the controller asks every shard of every run at each tick
TURN_COUNT_MAX = 65_536  # of a trajectory: an agent that takes it over asks for the results of all of them
SLOT_COUNT_MAX = 1_000_000  # of a worker or a lease
SIDE_COUNT_MAX = 65_536  # stretches of side arrays of a record
TURN_SIDES_BYTES_MAX = 12 * MIB  # of what is recorded beside a turn's tokens, prompt included
KEPT_ID_COUNT_MAX = 2 * MIB  # of a turn: ids that top_p and the like left, for all its tokens; 8 MiB
LOGPROB_COUNT_MAX = 20  # likeliest tokens that are told beside each one: OpenAI's bound, and vLLM's by default
IMAGE_BYTES_MAX = 4 * MIB  # of one file; a screenshot is a tenth of it
IMAGE_PIXELS_MAX = 32 * MIB  # width times height: a small file may unpack to any size
IMAGE_COUNT_MAX = 256  # of one context
IMAGES_BYTES_MAX = 32 * MIB  # of all files of a context, each counted once: a rollout holds them, and may have 64 MiB
NODE_COUNT_MAX = 4096  # of a rollout that branches: putting its branches together takes up to their product in steps
TEMPERATURE_MIN, TEMPERATURE_MAX = 0.01, 100.0  # of sampling, beside 0 (greedy); vLLM raises what is lower to 0.01
PENALTY_MAX = 2.0  # of presence and frequency, either way: OpenAI's and vLLM's bounds
REPETITION_MIN, REPETITION_MAX = 0.01, 100.0
STOP_COUNT_MAX, STOP_LENGTH_MAX = 64, 1024  # stop texts, and characters of each: all are looked for after every token
STOP_ID_COUNT_MAX = 1024  # looked through for every token
END_ID_COUNT_MAX = 64  # beside them: tokens that end a model's answers, which its agent adds
LOGIT_BIAS_COUNT_MAX, LOGIT_BIAS_MAX = 1024, 100.0  # vLLM's kernels take so many; vLLM's server cuts at 100
GUIDED_BYTES_MAX = 64 * KIB  # a JSON schema or regular expression as UTF-8: each worker compiles it

# Class of record → bytes. A class that is not listed may have OTHER_RECORD_BYTES_MAX.
RECORD_BYTES_MAX = {
    "RunConfig": 256 * KIB,  # read by every worker, with every change of a run
    "TrajectoryJob": TASK_BYTES_MAX + 64 * KIB,
    "TurnJob": 4 * PROMPT_TOKENS_MAX + 640 * KIB,  # stop texts of 256 KiB as UTF-8, doubled by escapes, and a grammar
    "TokenLog": 16 * MIB,  # a turn as long as a context: 8 bytes per token, and its spans
    "TurnResult": 16 * MIB,
    "Rollout": 64 * MIB,  # 64 turns that each fill 64k tokens, 9 bytes per token
    "DeadLetter": TASK_BYTES_MAX + 256 * KIB,  # the job, the reason, the end of a traceback
    "WorkerInfo": 64 * KIB,  # sent every second
    "LendSetting": 64 * KIB,  # read by serving workers with every heartbeat
    "SharingReport": 64 * KIB,  # sent every five seconds
    "LeasePlan": 4 * MIB,  # a row per worker, 200 bytes each
    "Sample": 256 * KIB,  # kept once a minute: 128 runs and as many workers, 400 bytes each at most
    "Agreement": 256 * KIB,  # of 64 workers about 70 KiB; shown every second
    "TokenDifferences": 512 * KIB,  # four bytes a token; trainer/agreement.py keeps half of it of a batch
    "Offer": MIB,  # of a collective: a line per member
    "Answer": 64 * KIB,  # to an offer: addresses
    "WeightManifest": 64 * MIB,  # 80 bytes per block of 4 MiB, a line per tensor, a digest per chunk
}
OTHER_RECORD_BYTES_MAX = MIB

# What to do about a record that is too large, where the class alone does not say it.
RECORD_ADVICE = {
    "RunConfig": "put large environment options into a file that agents can read, and its path into the options",
    "TurnJob": "end the episode earlier, or let its observations be shorter",
    "TurnResult": "ask for fewer tokens, or for less beside them (logprobs, kept_tokens)",
    "Rollout": "lower turn_count_max or max_tokens, say less in the environment's info, or ask for less beside tokens",
    "WorkerInfo": "offer fewer environments or reward functions on one worker",
}


def check_prompt(turn_id: str, token_count: int) -> None:
    """Require that a turn's context may be sent.

    Raises:
        PayloadTooLarge: names the turn, its tokens and the limit.
    """
    if token_count > PROMPT_TOKENS_MAX:
        raise PayloadTooLarge(
            f"the context of turn {turn_id} has {token_count:,} tokens, the limit is {PROMPT_TOKENS_MAX:,}: "
            f"{RECORD_ADVICE['TurnJob']}",
            size_bytes=4 * token_count,
            limit_bytes=4 * PROMPT_TOKENS_MAX,
        )
