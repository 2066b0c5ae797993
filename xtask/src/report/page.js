// What a reader sees of a page of `anyverbs report`, measured in the browser.
(() => {
	const all = (root, selector) => [...root.querySelectorAll(selector)];
	const box = (element) => element.getBoundingClientRect();
	const has = (outer, inner) =>
		inner.left >= outer.left - 1 && inner.right <= outer.right + 1 &&
		inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
	const meet = (a, b) =>
		Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
		Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
	const painted = (element) => {
		element.scrollIntoView({ block: "center", inline: "center" });
		const at = box(element);
		return document.elementFromPoint((at.left + at.right) / 2, (at.top + at.bottom) / 2) === element;
	};
	const drawing = (svg) => {
		const texts = all(svg, "text").map((text) => ({ text: text.textContent, box: box(text) }));
		const overlapping = [];
		texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
			if (meet(a.box, b.box)) overlapping.push(`${a.text} / ${b.text}`);
		}));
		const bars = all(svg, "rect");
		return {
			title: svg.querySelector("title").textContent,
			width: box(svg).width,
			height: box(svg).height,
			overlapping,
			outside: texts.filter((text) => !has(box(svg), text.box)).map((text) => text.text),
			smallest_text: Math.min(...texts.map((text) => text.box.height)),
			bars: bars.map((bar) => ({
				class: bar.getAttribute("class"),
				title: bar.textContent,
				is_seen: box(bar).width > 0.5 && box(bar).height > 0 && has(box(svg), box(bar)),
			})),
			is_painted: bars.length > 0 && painted(bars.reduce((a, b) => box(a).height > box(b).height ? a : b)),
			heads: all(svg, ".head").map((head) => head.textContent),
			arrows: all(svg, "line[marker-end]").map((arrow) => ({
				class: arrow.getAttribute("class"),
				label: arrow.nextElementSibling.textContent,
				length: box(arrow).width,
				is_drawn: getComputedStyle(arrow).stroke !== "none" && has(box(svg), box(arrow)),
			})),
			marks: all(svg, "circle").filter((mark) => box(mark).width > 0).length,
		};
	};
	const root = document.documentElement;
	return {
		title: document.title,
		elements: document.querySelectorAll("*").length,
		window: innerWidth,
		content: root.scrollWidth,
		resources: performance.getEntriesByType("resource").map((entry) => entry.name),
		broken_links: all(document, "a").map((link) => link.getAttribute("href"))
			.filter((place) => !place.startsWith("#") || !document.getElementById(place.slice(1))),
		drawings: all(document, "svg").map(drawing),
		findings: all(document, "details.finding").filter((finding) => box(finding).height > 0)
			.map((finding) => finding.innerText),
	};
})()
