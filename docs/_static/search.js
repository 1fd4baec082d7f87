// Ranks the sections in PAGES (docs/search_texts.py) by BM25, and shows excerpts.

const SATURATION = 1.2; // how many occurrences of a word count (BM25's k1)
// Added for words in headings, in titles and in first cells of rows, and for a phrase.
const HEADING = 3, TITLE = 6, ROW = 0.7, PHRASE = 10;

// "checkpointing" finds "checkpoints": endings are dropped, and any may follow.
// "allreduce" finds "all-reduce": a hyphen may follow each letter.
function pattern(word) {
  const stem = word.replace(/(?<=.{4})(?:ing|ed|es|e)$|(?<=..[^s])s$/, "");
  return new RegExp(`(?<![a-z0-9])${[...stem].join("-?")}`, "gi");
}

const count = (text, wanted) => (text.match(wanted) ?? []).length;

// 1 if a heading has all words that were asked for and no other, less for fewer, 0 for none.
function share(text, patterns) {
  const counts = patterns.map((one) => count(text, one));
  const asked = counts.reduce((sum, one) => sum + one, 0) / text.split(/[\s.]+/).length;
  return (Math.sqrt(Math.min(1, asked)) * counts.filter(Boolean).length) / patterns.length;
}

// Returns score, name, title and sections of each page that has all words, best first.
// If no page has all, pages with most of them count.
function find(query) {
  const words = query.toLowerCase().replace(/(?<=\w)-(?=\w)/g, "").split(/[^\p{L}\p{N}_]+/u).filter(Boolean);
  if (!words.length) return { patterns: [], found: [] };
  const patterns = words.map(pattern);
  const has = PAGES.map(([, title, , sections]) => {
    const text = title + " " + sections.map(([, heading, text]) => `${heading} ${text}`).join(" ");
    return patterns.map((one) => count(text, one) > 0);
  });
  const rarity = patterns.map((_, at) => {
    const pages = has.filter((row) => row[at]).length;
    return Math.log(1 + (PAGES.length - pages + 0.5) / (pages + 0.5));
  });
  const all = PAGES.flatMap(([, , , sections]) => sections);
  const usual = all.reduce((sum, [, , text]) => sum + text.length, 0) / all.length;
  const most = Math.max(...has.map((row) => row.filter(Boolean).length));
  const phrase = words.length > 3 ? query.toLowerCase().trim() : "\n"; // such as a message; no text has "\n"

  const found = [];
  PAGES.forEach(([name, title, factor, sections], index) => {
    if (most === 0 || has[index].filter(Boolean).length < most) return;
    const scored = sections.map((section) => {
      const [, heading, text, rows] = section;
      const size = SATURATION * (0.25 + (0.75 * text.length) / usual);
      let score = patterns.reduce((sum, one, at) => {
        const times = count(text, one) + HEADING * (count(heading, one) > 0);
        return sum + rarity[at] * ((times * (SATURATION + 1)) / (times + size) + ROW * (count(rows, one) > 0));
      }, 0);
      score += HEADING * share(heading, patterns);
      const literal = (text.toLowerCase().includes(phrase) + 2 * heading.toLowerCase().includes(phrase)) * PHRASE;
      return [score * factor + literal, section];
    });
    scored.sort((one, other) => other[0] - one[0]);
    const whole = share(title, patterns);
    const score = scored[0][0] + TITLE * whole * (whole === 1 ? 1 : factor);
    found.push([score, name, title, scored.filter(([score]) => score > 0).map(([, section]) => section)]);
  });
  found.sort((one, other) => other[0] - one[0]);
  return { patterns, found };
}

const EXCERPT = 200; // characters

// The part of a text that has most of the words, with the words marked.
function excerpt(text, patterns) {
  const places = patterns.flatMap((one) => [...text.matchAll(one)].map((match) => [match.index, match[0].length]));
  places.sort((one, other) => one[0] - other[0]);
  const within = ([at]) => places.filter(([next]) => next >= at && next < at + EXCERPT - 40).length;
  const best = places.reduce((one, other) => (within(other) > within(one) ? other : one), places[0] ?? [0, 0]);
  let begin = Math.max(0, best[0] - 40);
  if (begin > 0) begin = text.indexOf(" ", begin) + 1 || begin;
  begin = Math.min(begin, best[0]);
  const end = begin + EXCERPT < text.length ? text.lastIndexOf(" ", begin + EXCERPT) : text.length;
  const shown = document.createElement("p");
  let at = begin;
  if (begin > 0) shown.append("… ");
  for (const [place, length] of places) {
    if (place < at || place + length > end) continue;
    const mark = document.createElement("mark");
    mark.textContent = text.slice(place, place + length);
    shown.append(text.slice(at, place), mark);
    at = place + length;
  }
  shown.append(text.slice(at, end), end < text.length ? " …" : "");
  return shown;
}

function link(name, anchor, text) {
  const made = document.createElement("a");
  made.href = `${name}.html${anchor && "#" + anchor}`;
  made.textContent = text;
  return made;
}

function show(query) {
  const { patterns, found } = find(query);
  const count = found.length === 1 ? "1 page" : `${found.length} pages`;
  document.getElementById("search-status").textContent = `${count} found for "${query}"`;
  for (const [, name, title, sections] of found) {
    const item = document.createElement("li");
    const [[anchor, heading, text], ...others] = sections;
    item.append(link(name, anchor, title === heading ? title : `${title} › ${heading}`), excerpt(text, patterns));
    const more = document.createElement("p");
    for (const [anchor, heading] of others.slice(0, 2)) {
      more.append(more.hasChildNodes() ? ", " : "Also: ", link(name, anchor, heading));
    }
    item.append(more);
    document.getElementById("search-results").append(item);
  }
}

const query = new URLSearchParams(location.search).get("q");
for (const field of document.querySelectorAll("input[name=q]")) field.value = query;
if (query) show(query);
