/* Reliable connections: everything arrives once, in order and right, or the queue pair fails as it must. */
#include "exchange.h"

/* What a message says about itself. */
struct header {
	uint32_t qp, number, len, seed;
};

/* The counter that a queue pair alone adds to, the word that it alone swaps. */
enum { COUNTER = 0, WORD = 8 };

struct operation {
	char kind;
	int busy, offset, len;
	uint64_t expected;
	double posted;
};

struct queue {
	struct operation operations[MAX_DEPTH];
	/* Posted, completed well, outstanding work requests. */
	int posted, completed, outstanding;
	uint64_t added, word;
	uint32_t sent, received;
	/* The last completion that was a success, what our threads had waited for processors until then, and the end. */
	double alive, waited, failed_at;
};

/* What a side has done, for the other to compare with. */
struct totals {
	uint32_t sent[MAX_QPS];
	uint64_t added[MAX_QPS], word[MAX_QPS];
};

static struct queue queues[MAX_QPS];
static char *peers_source, *expected_bytes;
static uint64_t chance;
static double slowest;
static unsigned long done_ops;

static uint32_t below(uint32_t n)
{
	chance = mix(chance);
	return chance % n;
}

static uint64_t key_of(int from_client, int qp, uint32_t number)
{
	return mix(((uint64_t)opt.seed << 32 ^ number) * 64 + qp * 2 + from_client);
}

/* What our threads have waited for processors, looked up now and then. Who does not run is late without being wrong. */
static double waited;

static void look_what_was_waited(void)
{
	static double next;
	if (now() < next)
		return;
	waited = waited_for_processors();
	next = now() + 0.02;
}

static void sign_of_life(struct queue *queue, double when)
{
	queue->alive = when;
	queue->waited = waited;
}

/* How long there was no sign of life while we could have seen or given one. */
static double silence(const struct queue *queue)
{
	return now() - queue->alive - (waited_for_processors() - queue->waited);
}

static double bound(void)
{
	return 4 * 4.096e-6 * (double)(1ull << opt.timeout) * (opt.retries + 1) + 1;
}

/* Work requests of a slot: the last one is signaled and tells of all. */
static void post(struct side *side, int q, int slot)
{
	struct queue *queue = &queues[q];
	struct operation *op = &queue->operations[slot];
	uint64_t base = side->theirs.addr, local = (uintptr_t)side->memory + at_local(q, slot);
	struct ibv_sge sge = { local, 0, side->mr->lkey };
	struct ibv_send_wr second = { .wr_id = q * MAX_DEPTH + slot, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr wr = { .wr_id = q * MAX_DEPTH + slot, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr *bad;
	op->kind = opt.ops[below(strlen(opt.ops))];
	op->len = sizeof(struct header) + below(below(3) ? opt.size - sizeof(struct header) + 1 : 200 - 100);
	if (op->len > opt.size)
		op->len = opt.size;
	op->busy = 1;
	uint32_t number = queue->posted++;
	switch (op->kind) {
	case 's':;
		struct header header = { q, queue->sent++, op->len, opt.seed };
		memcpy((char *)local, &header, sizeof header);
		pattern((char *)local + sizeof header, op->len - sizeof header, key_of(!!opt.host, q, header.number));
		wr.opcode = IBV_WR_SEND;
		break;
	case 'w':
		/* Written, and read back behind it: the READ overwrites what was sent from, so the pattern is made anew to compare. */
		op->expected = key_of(!!opt.host, q, ~number);
		pattern((char *)local, op->len, op->expected);
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.send_flags = 0;
		wr.wr.rdma.remote_addr = base + at_slot(q, slot);
		wr.wr.rdma.rkey = side->theirs.rkey;
		second.opcode = IBV_WR_RDMA_READ;
		/* Else it could fetch into the buffer from which the WRITE is sent again. */
		second.send_flags |= IBV_SEND_FENCE;
		second.wr.rdma = wr.wr.rdma;
		wr.next = &second;
		break;
	case 'r':
		op->offset = below(SOURCE - op->len);
		wr.opcode = IBV_WR_RDMA_READ;
		wr.wr.rdma.remote_addr = base + at_source() + op->offset;
		wr.wr.rdma.rkey = side->theirs.rkey;
		break;
	default:
		op->len = 8;
		wr.wr.atomic.rkey = side->theirs.rkey;
		if (below(2)) {
			op->expected = queue->added;
			queue->added += wr.wr.atomic.compare_add = 1 + below(100);
			wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
			wr.wr.atomic.remote_addr = base + at_words(q) + COUNTER;
		} else {
			op->expected = wr.wr.atomic.compare_add = queue->word;
			queue->word = wr.wr.atomic.swap = mix(queue->word + number);
			wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
			wr.wr.atomic.remote_addr = base + at_words(q) + WORD;
		}
	}
	sge.length = op->len;
	wr.wr_id |= (uint64_t)!!wr.next << 31;
	if (opt.type[0] == 'x')
		wr.qp_type.xrc.remote_srqn = second.qp_type.xrc.remote_srqn = side->theirs.srqn;
	op->posted = now();
	if (queue->outstanding == 0)
		sign_of_life(queue, op->posted);
	queue->outstanding++;
	int failed = ibv_post_send(side->qp[q], &wr, &bad);
	if (failed)
		die(WRONG, "cannot post: %s", strerror(failed));
}

static void check_operation(struct side *side, int q, int slot)
{
	struct operation *op = &queues[q].operations[slot];
	char *local = side->memory + at_local(q, slot);
	uint64_t word;
	switch (op->kind) {
	case 'w':
		pattern(expected_bytes, op->len, op->expected);
		if (memcmp(local, expected_bytes, op->len))
			die(WRONG, "wrong bytes: WRITE of %d, read back, queue pair %d", op->len, q);
		break;
	case 'r':
		if (memcmp(local, peers_source + op->offset, op->len))
			die(WRONG, "wrong bytes: READ of %d from %d, queue pair %d", op->len, op->offset, q);
		break;
	case 'a':
		memcpy(&word, local, 8);
		if (word != op->expected)
			die(WRONG, "wrong value: an atomic found %lx, not %lx, queue pair %d", word, op->expected, q);
	}
}

static void check_message(struct side *side, const struct ibv_wc *wc)
{
	int number = wc->wr_id & 0xffffffff;
	const char *bytes = side->memory + at_receive(number);
	struct header header;
	memcpy(&header, bytes, sizeof header);
	if (wc->byte_len < sizeof header || header.qp >= (uint32_t)opt.qps || header.len != wc->byte_len ||
	    header.seed != (uint32_t)opt.seed || side->target[header.qp]->qp_num != wc->qp_num)
		die(WRONG, "a message that nobody sent, of %u bytes", wc->byte_len);
	if (header.number != queues[header.qp].received++)
		die(WRONG, "message %u in place of %u, queue pair %u", header.number, queues[header.qp].received - 1, header.qp);
	pattern(expected_bytes, header.len - sizeof header, key_of(!opt.host, header.qp, header.number));
	if (memcmp(bytes + sizeof header, expected_bytes, header.len - sizeof header))
		die(WRONG, "wrong bytes: message %u of %u bytes, queue pair %u", header.number, header.len, header.qp);
	post_receive(side, number);
}

/* A send that failed: the first of its queue pair says why, the others are flushed. */
static void check_failure(const struct ibv_wc *wc, int q)
{
	struct queue *queue = &queues[q];
	double since = now() - queue->alive;
	if (!queue->failed_at) {
		if (wc->status != IBV_WC_RETRY_EXC_ERR)
			die(WRONG, "queue pair %d failed with %s", q, ibv_wc_status_str(wc->status));
		if (since > bound() && silence(queue) > bound())
			die(LATE, "queue pair %d failed after %.2f s, %.2f s without waiting for processors, which is later than %.2f s",
			    q, since, silence(queue), bound());
		queue->failed_at = now();
	} else if (wc->status != IBV_WC_WR_FLUSH_ERR) {
		die(WRONG, "after the first error: %s", ibv_wc_status_str(wc->status));
	}
}

static void serve(struct side *side)
{
	struct ibv_wc wcs[32];
	int n = poll_side(side, wcs, 32);
	for (int i = 0; i < n; i++) {
		const struct ibv_wc *wc = &wcs[i];
		if (wc->wr_id >> 32) {
			if (wc->status == IBV_WC_SUCCESS)
				check_message(side, wc);
			else if (wc->status != IBV_WC_WR_FLUSH_ERR)
				die(WRONG, "a receive failed with %s", ibv_wc_status_str(wc->status));
			continue;
		}
		int first = wc->wr_id >> 31 & 1, q = (wc->wr_id & 0x7fffffff) / MAX_DEPTH, slot = wc->wr_id % MAX_DEPTH;
		struct queue *queue = &queues[q];
		struct operation *op = &queue->operations[slot];
		if (!op->busy)
			die(WRONG, "completed twice");
		if (wc->status != IBV_WC_SUCCESS) {
			check_failure(wc, q);
			/* Of a pair, the second tells of the slot. */
			if (first)
				continue;
			op->busy = 0;
			queue->outstanding--;
			continue;
		}
		if (queue->failed_at)
			die(WRONG, "a success after an error");
		double t = now();
		if (t - op->posted > slowest)
			slowest = t - op->posted;
		check_operation(side, q, slot);
		sign_of_life(queue, t);
		op->busy = 0;
		queue->outstanding--;
		queue->completed++;
		done_ops++;
	}
}

static void fill(struct side *side)
{
	for (int q = 0; q < opt.qps; q++)
		for (int slot = 0; slot < opt.depth; slot++)
			if (!queues[q].operations[slot].busy && !queues[q].failed_at &&
			    (opt.endless || queues[q].posted < opt.count))
				post(side, q, slot);
}

static int state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	return ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) ? -1 : (int)attr.qp_state;
}

/* Whether every queue pair is done; dies if all that can still happen has failed. */
static int finished(struct side *side)
{
	int done = 0, failed = 0;
	double last = 0;
	for (int q = 0; q < opt.qps; q++) {
		struct queue *queue = &queues[q];
		if (!queue->failed_at && queue->outstanding && now() - queue->alive > bound() + 1 && silence(queue) > bound() + 1)
			die(LATE, "queue pair %d of %d neither goes on nor fails for %.2f s, %.2f s without waiting for processors: %d outstanding, state %d",
			    q, opt.qps, now() - queue->alive, silence(queue), queue->outstanding, state_of(side->qp[q]));
		if (queue->failed_at && queue->outstanding && now() - queue->failed_at > 1)
			die(LATE, "queue pair %d did not flush", q);
		failed += queue->failed_at && !queue->outstanding;
		done += !queue->failed_at && !queue->outstanding && !opt.endless && queue->completed == opt.count;
		if (queue->failed_at && queue->failed_at - queue->alive > last)
			last = queue->failed_at - queue->alive;
	}
	if (failed && failed + done == opt.qps)
		die(UNREACHABLE, "the right error in time: %d queue pairs after at most %.3f s of %.3f s; %lu operations before",
		    failed, last, bound(), done_ops);
	return done == opt.qps;
}

/* The other's totals, while its requests are still served; whether they are here. */
static int hear(int tcp, struct totals *totals, size_t *got)
{
	if (*got == sizeof *totals)
		return 1;
	ssize_t n = recv(tcp, (char *)totals + *got, sizeof *totals - *got, MSG_DONTWAIT);
	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
		die(PEER_GONE, "the other side is gone");
	*got += n > 0 ? n : 0;
	return *got == sizeof *totals;
}

static int all_received(const struct totals *theirs)
{
	for (int q = 0; q < opt.qps; q++)
		if (queues[q].received < theirs->sent[q])
			return 0;
	return 1;
}

static void compare(struct side *side, const struct totals *theirs)
{
	for (int q = 0; q < opt.qps; q++) {
		uint64_t words[2];
		memcpy(words, side->memory + at_words(q), sizeof words);
		if (queues[q].received != theirs->sent[q] || words[0] != theirs->added[q] || words[1] != theirs->word[q])
			die(WRONG, "in the end: %u messages of %u, counter %lu of %lu, word %lx of %lx", queues[q].received,
			    theirs->sent[q], words[0], theirs->added[q], words[1], theirs->word[q]);
	}
}

static void say_progress(void)
{
	static double next, waited_before;
	static unsigned long before;
	double t = now();
	if (t < next)
		return;
	double waits = waited_for_processors();
	printf("at %.3f: %lu operations, %lu more, slowest %.1f ms, waited %.1f ms for processors\n", t, done_ops,
	       done_ops - before, slowest * 1e3, (waits - waited_before) * 1e3);
	waited_before = waits;
	before = done_ops;
	slowest = 0;
	next = t + 0.1;
}

void exchange_reliable(struct side *side)
{
	peers_source = malloc(SOURCE);
	expected_bytes = malloc(opt.size);
	pattern(peers_source, SOURCE, opt.seed * 2 + !opt.host);
	chance = mix(opt.seed * 2 + !!opt.host);
	printf("connected\n");
	do {
		look_what_was_waited();
		fill(side);
		serve(side);
		if (opt.endless)
			say_progress();
	} while (!finished(side));
	struct totals mine = { 0 }, theirs;
	for (int q = 0; q < opt.qps; q++) {
		mine.sent[q] = queues[q].sent;
		mine.added[q] = queues[q].added;
		mine.word[q] = queues[q].word;
	}
	if (send(side->tcp, &mine, sizeof mine, MSG_NOSIGNAL) != sizeof mine)
		die(PEER_GONE, "the other side is gone");
	size_t got = 0;
	while (!hear(side->tcp, &theirs, &got) || !all_received(&theirs))
		serve(side);
	compare(side, &theirs);
	/* What it sent last may have to be answered again. */
	char a = 'e', b;
	if (send(side->tcp, &a, 1, MSG_NOSIGNAL) != 1)
		die(PEER_GONE, "the other side is gone");
	while (recv(side->tcp, &b, 1, MSG_DONTWAIT) < 0)
		serve(side);
	printf("all right: %lu operations, the slowest took %.1f ms of %.0f ms\n", done_ops, slowest * 1e3, bound() * 1e3);
}
