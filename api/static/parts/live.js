// What a view reads besides the status: again now and then, one call at a time, with the last answer kept in sight.

import { ApiError } from "../client.js";

const REFUSED_MS = 10_000; // what was refused, or is not there, is asked for less often
const FAILED_MS = 2000; // what failed may go well soon
const SHARE = 10; // an answer that takes long is asked for less often: at most a tenth of the time is spent on it

export class Reading {
  /** read: a call that answers; every_ms: how often. value: the last answer, or null; error: why the last call has none. */
  constructor(read, every_ms) {
    this.read = read;
    this.every_ms = every_ms;
    this.value = null;
    this.error = null;
    this.dueAt = 0;
    this.turn = 0;
  }

  /** Read if it is time; whether anything came. */
  async refresh() {
    const start = performance.now();
    if (start < this.dueAt) return false;
    this.dueAt = Infinity;
    const turn = ++this.turn;
    try {
      const value = await this.read();
      if (turn !== this.turn) return false;
      this.value = value;
      this.error = null;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (turn !== this.turn) return false;
      this.error = error;
    }
    const now = performance.now();
    this.dueAt = now + (this.error ? pauseAfter(this.error) : Math.max(this.every_ms, SHARE * (now - start)));
    return true;
  }

  /** Have the next look read again; what was asked before is not waited for. */
  renew() {
    this.turn += 1;
    this.dueAt = 0;
  }
}

const pauseAfter = (error) => (error.isPassing ? FAILED_MS : REFUSED_MS);

/** A list that the server hands out in pages: as many of them as were asked for. */
export class Pages {
  /** read: answers a page for a cursor (null: the first); rowsOf: its rows. */
  constructor(read, rowsOf, every_ms) {
    this.pageCount = 1;
    this.reading = new Reading(async () => {
      const rows = [];
      let page = null;
      for (let index = 0; index < this.pageCount && (page === null || page.cursor); index++) {
        page = await read(page?.cursor ?? null);
        rows.push(...rowsOf(page));
      }
      return { ...page, rows };
    }, every_ms);
  }

  more() {
    this.pageCount += 1;
    this.reading.renew();
  }
}
