#!/usr/bin/env bash
# A trainer in curl alone, beside `rollfab up`: publishes weights, submits tasks, consumes groups.
#   URL=http://127.0.0.1:8765 KEY=$(cat rollfab-data/api.key) docs/examples/trainer.sh model.safetensors
set -euo pipefail
url=$URL/v1/runs/from-curl
call() { # METHOD PATH [curl's words]
  curl --silent --show-error --fail-with-body -X "$1" -H "Authorization: Bearer $KEY" "$url$2" "${@:3}"
  echo
}
json=(-H "Content-Type: application/json" --data)

call PUT "" "${json[@]}" '{"model": "tiny", "environment": "frozenlake", "settings": {"sampling": {"max_tokens": 4}}}'

# Weights, in pieces of 8 MiB: a call that failed is sent again, and one that went through twice changes nothing.
size=$(wc -c < "$1")
for ((offset = 0; offset < size; offset += 8388608)); do
  tail -c +$((offset + 1)) "$1" | head -c 8388608 |
    call PUT "/uploads/0/model.safetensors?offset=$offset" -H "Content-Type: application/octet-stream" --data-binary @-
done
call POST /versions "${json[@]}" '{"version": 0}'

call POST /groups "${json[@]}" '{"tasks": [{"seed": 1}, {"seed": 2}], "group_size": 4, "group_ids": ["g1", "g2"]}'
for _ in 1 2; do
  got=$(call POST /groups/receive "${json[@]}" '{"wait_s": 60, "hold_s": 60}')
  receipt=$(grep -o '"receipt":"[0-9a-f]*"' <<< "$got" | cut -d '"' -f 4) || { echo "no group: $got"; exit 1; }
  echo "${got:0:120}…" # learn from it here; then say that it is used:
  call POST /groups/acknowledge "${json[@]}" "{\"receipts\": [\"$receipt\"]}"
done
