/* Unreliable services: messages may be lost as a whole; one that arrives is right. */
#include "exchange.h"

struct header {
	uint32_t qp, number, len, seed;
};

static uint8_t *seen;
static char *expected_bytes;
static uint32_t received, repeated;

static uint64_t key_of(int from_client, int qp, uint32_t number)
{
	return mix(((uint64_t)opt.seed << 32 ^ number) * 64 + qp * 2 + from_client);
}

static uint32_t len_of(int qp, uint32_t number)
{
	return sizeof(struct header) + key_of(7, qp, number) % (opt.size - sizeof(struct header) + 1);
}

static void write_message(char *to, int q, uint32_t number, uint32_t len, int from_client)
{
	struct header header = { q, number, len, opt.seed };
	memcpy(to, &header, sizeof header);
	pattern(to + sizeof header, len - sizeof header, key_of(from_client, q, number));
}

static void check(struct side *side, const struct ibv_wc *wc)
{
	int place = wc->wr_id & 0xffffffff, ud = opt.type[1] == 'd';
	const char *bytes = side->memory + at_receive(place) + (ud ? 40 : 0);
	uint32_t len = wc->byte_len - (ud ? 40 : 0);
	struct header header = { 0 };
	if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
		/* The place says which one it must be. */
		uint32_t which = ntohl(wc->imm_data);
		if (which >= (uint32_t)(opt.qps * opt.count))
			die(WRONG, "a WRITE that nobody sent");
		bytes = side->memory + at_message(which);
		memcpy(&header, bytes, sizeof header);
		if (header.qp * opt.count + header.number != which)
			die(WRONG, "a WRITE with immediate data without its data");
	} else if (len >= sizeof header) {
		memcpy(&header, bytes, sizeof header);
	}
	if (header.qp >= (uint32_t)opt.qps || header.number >= (uint32_t)opt.count || header.len != len ||
	    header.seed != (uint32_t)opt.seed || side->qp[header.qp]->qp_num != wc->qp_num)
		die(WRONG, "a message that nobody sent, of %u bytes", len);
	write_message(expected_bytes, header.qp, header.number, len, !opt.host);
	if (memcmp(bytes, expected_bytes, len))
		die(WRONG, "wrong bytes: message %u of %u bytes, queue pair %u", header.number, len, header.qp);
	uint8_t *mark = &seen[header.qp * opt.count + header.number];
	received += !*mark;
	repeated += *mark;
	*mark = 1;
	post_receive(side, place);
}

static void post(struct side *side, int q, int slot, uint32_t number)
{
	char *local = side->memory + at_local(q, slot);
	uint32_t len = len_of(q, number), which = q * opt.count + number;
	struct ibv_sge sge = { (uintptr_t)local, len, side->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = q * MAX_DEPTH + slot, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
		.opcode = IBV_WR_SEND };
	struct ibv_send_wr *bad;
	write_message(local, q, number, len, !!opt.host);
	if (opt.type[1] == 'd') {
		wr.wr.ud.ah = side->ah;
		wr.wr.ud.remote_qpn = side->theirs.qpn[q];
		wr.wr.ud.remote_qkey = 0x11111111;
	} else if (number & 1) {
		wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr.imm_data = htonl(which);
		wr.wr.rdma.remote_addr = side->theirs.addr + at_message(which);
		wr.wr.rdma.rkey = side->theirs.rkey;
	}
	int failed = ibv_post_send(side->qp[q], &wr, &bad);
	if (failed)
		die(WRONG, "cannot post: %s", strerror(failed));
}

void exchange_unreliable(struct side *side)
{
	uint32_t total = opt.qps * opt.count, posted = 0, completed = 0;
	/* One outstanding in a slot. */
	uint8_t busy[MAX_QPS][MAX_DEPTH] = { 0 };
	uint32_t next[MAX_QPS] = { 0 };
	seen = calloc(total, 1);
	expected_bytes = malloc(opt.size);
	printf("connected\n");
	char mine = 'd', theirs;
	int told = 0, heard = 0;
	double quiet_since = now();
	/* What is still on its way arrives within a moment. */
	while (!heard || !told || now() - quiet_since < 0.5) {
		for (int q = 0; q < opt.qps; q++)
			for (int slot = 0; slot < opt.depth; slot++)
				if (!busy[q][slot] && next[q] < (uint32_t)opt.count) {
					busy[q][slot] = 1;
					post(side, q, slot, next[q]++);
					posted++;
				}
		struct ibv_wc wcs[32];
		int n = poll_side(side, wcs, 32);
		for (int i = 0; i < n; i++) {
			if (wcs[i].status != IBV_WC_SUCCESS)
				die(WRONG, "failed with %s", ibv_wc_status_str(wcs[i].status));
			if (wcs[i].wr_id >> 32) {
				check(side, &wcs[i]);
			} else {
				busy[wcs[i].wr_id / MAX_DEPTH][wcs[i].wr_id % MAX_DEPTH] = 0;
				completed++;
			}
			quiet_since = now();
		}
		if (!told && completed == total) {
			if (send(side->tcp, &mine, 1, MSG_NOSIGNAL) != 1)
				die(PEER_GONE, "the other side is gone");
			told = 1;
		}
		if (!heard) {
			ssize_t got = recv(side->tcp, &theirs, 1, MSG_DONTWAIT);
			if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
				die(PEER_GONE, "the other side is gone");
			if (got == 1) {
				heard = 1;
				quiet_since = now();
			}
		}
	}
	swap_over_tcp(side->tcp, &mine, &theirs, 1);
	if (received == 0 || (opt.whole && received != total))
		die(WRONG, "of %u messages %u arrived", total, received);
	printf("all right: of %u messages %u arrived, %u of them more than once\n", total, received, repeated);
}
