// A trainer in TypeScript without dependencies, beside `rollfab up`: submits tasks and takes groups from a stream.
// Its run must be there, with published weights (docs/http.md).
//   URL=http://127.0.0.1:8765 KEY=$(cat rollfab-data/api.key) node trainer.ts     (Node 23.6 or newer; or compile it)
declare const process: { env: Record<string, string | undefined> };

interface Rollout {
  reward: number | null;
  prompt_ids: number[];
  completion_ids: number[];
  completion_mask: number[];
  logprobs: (number | string)[];
}
interface Received {
  receipt: string;
  group: { group_id: string; redelivered: boolean; rollouts: Rollout[] };
}

const RUN = `${process.env.URL}/v1/runs/${process.env.RUN ?? "from-typescript"}`;

async function call(method: string, path: string, body?: unknown): Promise<Response> {
  const headers = { authorization: `Bearer ${process.env.KEY}`, "content-type": "application/json" };
  const answer = await fetch(RUN + path, { method, headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${await answer.text()}`);
  return answer;
}

/** Give the groups of a stream, of which at most `count` are unacknowledged; tell why none comes, and what ended it. */
async function* groups(count: number): AsyncGenerator<Received> {
  const answer = await call("POST", "/groups/stream", { count });
  const decoder = new TextDecoder();
  let text = "";
  let why = "";
  for await (const piece of answer.body as unknown as AsyncIterable<Uint8Array>) {
    text += decoder.decode(piece, { stream: true });
    const messages = text.split("\n\n");
    text = messages.pop() ?? "";
    for (const message of messages) {
      const data = message.split("\n").find((line) => line.startsWith("data: "));
      if (message.startsWith(": ") && message.slice(2) !== why) console.error((why = message.slice(2)));
      if (message.startsWith("event: error")) throw new Error(`the stream ended: ${data?.slice(6)}`);
      if (data) yield JSON.parse(data.slice(6)) as Received;
    }
  }
  throw new Error(`the stream ended: ${why}`);
}

const tasks = Array.from({ length: 4 }, (_, seed) => ({ seed }));
await call("POST", "/groups", { tasks, group_size: 4 });
let left = tasks.length;
for await (const { receipt, group } of groups(2)) {
  const rewards = group.rollouts.map((rollout) => rollout.reward ?? 0);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / Math.max(rewards.length, 1);
  console.log(`${group.group_id}: ${rewards.length} rollouts, mean reward ${mean.toFixed(2)}`); // learn here
  await call("POST", "/groups/acknowledge", { receipts: [receipt] });
  if (--left === 0) break;
}
export {};
