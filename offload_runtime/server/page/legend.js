// The sources of tokens that took part in what is shown, and what they are.

import { SOURCES } from "./constants.js";
import { add, element } from "./elements.js";

const HEAD = "a part of the model that guesses from what the model made of the tokens before";
const WHAT_PROPOSES = {
  ngram: "guesses from what the conversation has said before", draft: "a small model that guesses",
  self: "a copy of the model in 4 bits that guesses", mtp: HEAD, eagle3: HEAD, dflash: HEAD,
  retrieval: "the model itself, guessing from a part of a long conversation",
  target: "the model's own tokens. It checks every guess, so the answer is its own, whoever guesses",
};

// Counts of tokens in the colours of who proposed them, in the order of SOURCES.
export function addCounts(parent, counts) {
  for (const source of Object.keys(SOURCES).filter((one) => counts[one])) {
    add(parent, "span", source, `${SOURCES[source]} ${counts[source]}`);
    parent.append(" ");
  }
}

export function showLegend(answers, isShown) {
  const counts = {};
  for (const answer of answers) {
    for (const [source, count] of Object.entries(answer.counts)) counts[source] = (counts[source] ?? 0) + count;
  }
  const legend = element("legend");
  legend.hidden = !isShown;
  const [summary, list] = legend.children;
  summary.replaceChildren();
  list.replaceChildren();
  addCounts(summary, counts);
  if (!summary.children.length) summary.textContent = "no token has been said yet";
  for (const source of Object.keys(SOURCES).filter((one) => counts[one])) {
    add(list, "dt", "", SOURCES[source]);
    add(list, "dd", "", WHAT_PROPOSES[source]);
  }
}
