// Verdicts and scores of a run's clients, unpacked when they are needed, and their ROC.
const unpacked = new Map();

/** Decode the verdicts of a run; they are gzipped JSON in base64. */
function verdictsOf(run) {
  if (!unpacked.has(run.clients)) {
    const bytes = Uint8Array.from(atob(data.verdicts[run.clients]), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const job = { value: null, promise: null };
    job.promise = new Response(stream).json().then((value) => (job.value = value));
    unpacked.set(run.clients, job);
  }
  return unpacked.get(run.clients);
}

/**
 * ROC of the scores: a client is rejected if its score is at least a limit that falls from above
 * the highest score. Equal scores make one step, so that ties count half in the area.
 */
function rocOf(round) {
  if (!round?.scores) return null;
  const marks = [...round.malicious]
    .map((mark, i) => [round.scores[i], mark === "1"])
    .filter(([score]) => isNumber(score));
  const nBad = marks.filter(([, bad]) => bad).length;
  const nGood = marks.length - nBad;
  if (!nBad || !nGood) return null;
  marks.sort((a, b) => b[0] - a[0]);
  const points = [[0, 0]];
  let [hits, falseAlarms, auc] = [0, 0, 0];
  for (let i = 0; i < marks.length;) {
    let j = i;
    while (j < marks.length && marks[j][0] === marks[i][0]) {
      if (marks[j][1]) hits += 1;
      else falseAlarms += 1;
      j += 1;
    }
    const [x, y] = [falseAlarms / nGood, hits / nBad];
    const [px, py] = points[points.length - 1];
    auc += ((x - px) * (y + py)) / 2;
    points.push([x, y]);
    i = j;
  }
  return { points, auc };
}

/** Height of a ROC at a false-alarm rate: the upper end of a vertical step. */
function rocAt(points, x) {
  let best = 0;
  for (let i = 1; i < points.length; i += 1) {
    const [[ax, ay], [bx, by]] = [points[i - 1], points[i]];
    if (bx <= x) best = by;
    else if (ax <= x) return Math.max(best, ay + ((by - ay) * (x - ax)) / (bx - ax));
  }
  return best;
}

/** Mean ROC at equal false-alarm rates, and the mean of the areas. */
function meanRoc(rocs) {
  const xs = Array.from({ length: 101 }, (_, i) => i / 100);
  return {
    points: [[0, 0], ...xs.map((x) => [x, mean(rocs.map(({ points }) => rocAt(points, x)))])],
    auc: mean(rocs.map(({ auc }) => auc)),
    n: rocs.length,
  };
}

/** Clients that are malicious in any round come first, then by id. */
function clientOrder(rounds) {
  const malicious = new Map();
  for (const round of rounds) {
    round.ids.forEach((id, i) =>
      malicious.set(id, malicious.get(id) || round.malicious[i] === "1"),
    );
  }
  return [...malicious]
    .sort(([a, badA], [b, badB]) => badB - badA || (a > b) - (a < b))
    .map(([id, bad]) => ({ id, malicious: bad }));
}

const STATES = {
  a: { name: "accepted", light: "#dfe5ec", dark: "#3b4450" },
  r: { name: "rejected", light: "#0b4f8a", dark: "#6fb4ec" },
  x: { name: "refused before judging", light: "#e69f00", dark: "#e69f00" },
  "-": { name: "not judged", light: "#f7f8fa", dark: "#22272e" },
};
const stateOf = (mark) => STATES[mark] ?? STATES["-"];
