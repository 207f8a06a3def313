// What the answers of /statistics say over time: rates and percentiles come from differences of totals.

const KEPT = 300; // answers, one a second

export class History {
  constructor() { this.samples = []; }

  get last() { return this.samples.at(-1); }

  add(sample) {
    const { last } = this;
    if (last && sample.time_s < last.time_s) this.samples = []; // another process, whose totals begin at 0
    this.samples.push(sample);
    if (this.samples.length > KEPT) this.samples.shift();
  }

  /** The values of a function of each sample. */
  series(of) { return this.samples.map(of); }

  /** The gain of a total in each second between two samples; one value fewer than there are samples. */
  rates(total) {
    return this.samples.slice(1).map((sample, at) => {
      const before = this.samples[at];
      return gain(total(before), total(sample)) / Math.max(1e-3, sample.time_s - before.time_s);
    });
  }

  /** The sample from `seconds` ago, or the first one. */
  since(seconds) {
    return this.samples.find(sample => sample.time_s >= this.last.time_s - seconds - 0.01) ?? this.last;
  }

  /** The gain of a total in the last `seconds`; null while there is one sample. */
  gained(total, seconds) {
    return this.samples.length < 2 ? null : gain(total(this.since(seconds)), total(this.last));
  }

  /** The gain of a total in each second, over the last `seconds`. */
  rate(total, seconds) {
    const old = this.since(seconds);
    return old === this.last ? null : gain(total(old), total(this.last)) / (this.last.time_s - old.time_s);
  }

  /** Percentiles of durations observed in the last `seconds`; null if there were none. */
  percentiles(of, fractions, seconds) {
    const now = of(this.last), old = of(this.since(seconds));
    if (!now || !old) return null;
    const counts = now.counts.map((value, at) => gain(old.counts[at] ?? 0, value));
    const all = counts.reduce((sum, value) => sum + value, 0);
    return all ? fractions.map(fraction => quantile(now.bounds, counts, fraction * all)) : null;
  }
}

/** The sum of a figure over engines; null if no engine has it. */
export function sum(sample, of) {
  const values = sample.engines.map(of).filter(value => value !== null && value !== undefined);
  return values.length ? values.reduce((all, value) => all + value, 0) : null;
}

const gain = (old, now) => Math.max(0, (now ?? 0) - (old ?? 0));

/** The duration below which `rank` observations lie, with even density within a bucket. */
function quantile(bounds, counts, rank) {
  let below = 0;
  for (let at = 0; at < counts.length; at++) {
    if (counts[at] && below + counts[at] >= rank) {
      const low = at ? bounds[at - 1] : 0, high = bounds[at] ?? low;
      return low + (high - low) * ((rank - below) / counts[at]);
    }
    below += counts[at];
  }
  return bounds.at(-1);
}
