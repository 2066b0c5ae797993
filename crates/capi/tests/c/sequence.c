/*
 * A random sequence of calls, valid and not: nothing crashes, hangs or leaks, whatever the order. The answer to a single
 * call is another program's matter; what is wrong here is an object that is lost, an event that is never acknowledged, or
 * a destroy that succeeds while something uses the object.
 *
 * sequence [STEPS [SEED [THREADS]]]; the same seed makes the same calls (what is in flight meanwhile differs). Each thread
 * has objects of its own, on one device (S5.6).
 *
 * With FUZZ defined it is the body of the fuzz target `capi`: an input chooses the calls, until it is used up.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check_line.h"

#define MOST 12
#define ARENA (1 << 20)

static struct ibv_context *context;
static uint8_t arena[ARENA] __attribute__((aligned(4096)));
static __thread uint64_t random_state;
/* What went through: a sequence in which nothing does shows nothing. */
static __thread unsigned long made, posted, completed, succeeded, events;

#ifdef FUZZ
static __thread const uint8_t *input;
static __thread size_t left;

/* A choice by so many bytes of the input; by chance when it is used up. */
static uint64_t drawn(size_t bytes)
{
	uint64_t value = 0;
	for (; bytes && left; bytes--, left--)
		value = value << 8 | *input++;
	return value;
}
#else
enum { left = 0 };
static uint64_t drawn(size_t bytes)
{
	(void)bytes;
	return 0;
}
#endif

static uint64_t next(void)
{
	if (left)
		return drawn(8);
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state * 0x2545f4914f6cdd1dull;
}

static uint32_t below(uint32_t limit)
{
	if (left)
		return (uint32_t)(limit ? drawn(limit <= 0x100 ? 1 : limit <= 0x10000 ? 2 : 4) % limit : 0);
	return (uint32_t)((next() >> 32) * limit >> 32);
}

/* Once in so many times. */
static int once_in(uint32_t times)
{
	return below(times) == 0;
}

/* Objects of one kind. */
struct pool {
	void *object[MOST];
	int count;
};

static __thread struct pool pds, cqs, cqs_ex, mrs, qps, srqs, ahs, channels, mws, dms, xrcds, wqs, tables, flows, counters, tds,
	comp_cntrs;

static void *any(struct pool *pool)
{
	return pool->count ? pool->object[below(pool->count)] : NULL;
}

static void add(struct pool *pool, void *object)
{
	if (object) {
		pool->object[pool->count++] = object;
		made++;
	} else {
		CHECK(errno != 0);
	}
}

static int has_room(struct pool *pool)
{
	errno = 0;
	return pool->count < MOST;
}

/* Calls `destroy` with one of the objects; EBUSY leaves it where it is. */
#define DESTROY(pool, type, destroy)                                                            \
	do {                                                                                    \
		int at = (pool)->count ? (int)below((pool)->count) : -1;                        \
		if (at >= 0) {                                                                  \
			type *object = (pool)->object[at];                                      \
			int failed = destroy(object);                                           \
			CHECK(!failed || failed == EBUSY);                                      \
			if (!failed)                                                            \
				(pool)->object[at] = (pool)->object[--(pool)->count];           \
		}                                                                               \
	} while (0)

static struct ibv_cq *any_cq(void)
{
	if (cqs_ex.count && once_in(4))
		return ibv_cq_ex_to_cq(any(&cqs_ex));
	return any(&cqs);
}

static int random_access(void)
{
	int sane = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		   IBV_ACCESS_REMOTE_ATOMIC;
	if (once_in(4))
		return (int)(next() & 0x3ff);
	return once_in(2) ? sane : sane | IBV_ACCESS_MW_BIND;
}

static void make_cq(void)
{
	int cqe = once_in(8) ? (int)next() : (int)below(200) + 1;
	if (once_in(2)) {
		if (has_room(&cqs))
			add(&cqs, ibv_create_cq(context, cqe, NULL, any(&channels), once_in(9) ? 77 : 0));
		return;
	}
	struct ibv_cq_init_attr_ex init = {
		.cqe = (uint32_t)cqe,
		.channel = any(&channels),
		.wc_flags = once_in(4) ? next() & 0x3fff : IBV_WC_STANDARD_FLAGS,
		.comp_mask = once_in(4) ? (uint32_t)next() & 7 : 0,
		.flags = once_in(4) ? below(8) : 0,
	};
	/* No parent domain is given. */
	init.comp_mask &= ~(uint32_t)IBV_CQ_INIT_ATTR_MASK_PD;
	if (has_room(&cqs_ex))
		add(&cqs_ex, ibv_create_cq_ex(context, &init));
}

static void make_mr(void)
{
	uint64_t offset = below(ARENA), length = below(ARENA);
	if (!has_room(&mrs))
		return;
	void *address = arena + offset;
	if (once_in(10))
		address = (void *)(uintptr_t)(once_in(2) ? next() : 0x1000);
	else if (!once_in(4))
		length = below((uint32_t)(ARENA - offset)) + 1;
	struct ibv_pd *pd = any(&pds);
	if (!pd)
		return;
	switch (below(4)) {
	case 0:
		add(&mrs, ibv_reg_mr_iova(pd, address, length, next(), random_access()));
		break;
	case 1:
		if (dms.count) {
			add(&mrs, ibv_reg_dm_mr(pd, any(&dms), below(5000), below(5000),
						(unsigned)random_access() | IBV_ACCESS_ZERO_BASED));
			break;
		}
		/* fall through */
	default:
		add(&mrs, ibv_reg_mr(pd, address, length, random_access()));
	}
}

static void change_mr(void)
{
	struct ibv_mr *mr = any(&mrs);
	if (!mr)
		return;
	uint64_t offset = below(ARENA / 2);
	ibv_rereg_mr(mr, (int)below(16), any(&pds), arena + offset, below(ARENA / 2) + 1, random_access());
}

static void make_srq(void)
{
	struct ibv_pd *pd = any(&pds);
	if (!pd || !has_room(&srqs))
		return;
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = once_in(8) ? (uint32_t)next() : below(100) + 1, .max_sge = below(5) },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = below(4),
		.pd = pd,
		.xrcd = any(&xrcds),
		.cq = any_cq(),
		.tm_cap = { .max_num_tags = below(40), .max_ops = below(40) },
	};
	if (init.xrcd)
		init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
	if (init.cq)
		init.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
	if (once_in(3))
		init.comp_mask |= IBV_SRQ_INIT_ATTR_TM;
	if (once_in(2)) {
		struct ibv_srq_init_attr plain = { .attr = init.attr };
		add(&srqs, ibv_create_srq(pd, &plain));
	} else {
		add(&srqs, ibv_create_srq_ex(context, &init));
	}
}

static uint64_t send_ops(enum ibv_qp_type type)
{
	if (once_in(8))
		return next() & 0x1fff;
	if (type == IBV_QPT_RC && once_in(2))
		return 0x3ff | IBV_QP_EX_WITH_ATOMIC_WRITE;
	if (type == IBV_QPT_UD)
		return IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
	return IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND_WITH_IMM;
}

static void make_qp(void)
{
	static const enum ibv_qp_type types[] = { IBV_QPT_RC,	    IBV_QPT_RC,	      IBV_QPT_UC,
						  IBV_QPT_UD,	    IBV_QPT_XRC_SEND, IBV_QPT_XRC_RECV,
						  IBV_QPT_RAW_PACKET, IBV_QPT_DRIVER, 99 };
	struct ibv_pd *pd = any(&pds);
	struct ibv_cq *send = any_cq(), *recv = any_cq();
	if (!pd || !send || !has_room(&qps))
		return;
	struct ibv_qp_init_attr_ex init = {
		.send_cq = send,
		.recv_cq = recv,
		.srq = once_in(4) ? any(&srqs) : NULL,
		.cap = { .max_send_wr = below(40) + !once_in(8),
			 .max_recv_wr = below(40) + !once_in(8),
			 .max_send_sge = below(4) + 2 * !once_in(8),
			 .max_recv_sge = below(4) + 2 * !once_in(8),
			 .max_inline_data = below(200) },
		.qp_type = types[below(sizeof types / sizeof *types)],
		.sq_sig_all = (int)below(2),
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd,
	};
	if (once_in(16))
		init.cap.max_send_wr = (uint32_t)next();
	if (init.qp_type == IBV_QPT_XRC_RECV || once_in(20)) {
		init.xrcd = any(&xrcds);
		if (!init.xrcd)
			return;
		init.comp_mask = IBV_QP_INIT_ATTR_XRCD | (once_in(4) ? IBV_QP_INIT_ATTR_PD : 0);
	} else if (once_in(2)) {
		init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		init.send_ops_flags = send_ops(init.qp_type);
	}
	if (once_in(10)) {
		init.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
		init.create_flags = (uint32_t)next() & 0xfff;
	}
	if (tables.count && once_in(4)) {
		init.comp_mask |= IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH;
		init.rwq_ind_tbl = any(&tables);
		init.rx_hash_conf.rx_hash_function = (uint8_t)below(3);
		init.rx_hash_conf.rx_hash_key_len = once_in(4) ? (uint8_t)next() : 40;
		init.rx_hash_conf.rx_hash_key = arena;
		init.rx_hash_conf.rx_hash_fields_mask = below(1 << 12);
		if (init.rx_hash_conf.rx_hash_key_len > 40 && once_in(2))
			init.rx_hash_conf.rx_hash_key_len = 40;
	}
	add(&qps, ibv_create_qp_ex(context, &init));
}

static union ibv_gid gid;

static struct ibv_ah_attr address(void)
{
	struct ibv_ah_attr attr = { .is_global = !once_in(16), .port_num = once_in(16) ? (uint8_t)next() : 1 };
	attr.grh.dgid = gid;
	attr.grh.hop_limit = 64;
	attr.grh.sgid_index = once_in(16) ? (uint8_t)next() : 0;
	if (once_in(16))
		attr.grh.dgid.raw[below(16)] ^= (uint8_t)next();
	return attr;
}

static void move_qp(struct ibv_qp *qp, enum ibv_qp_state to, uint32_t peer)
{
	struct ibv_qp_attr attr = { .qp_state = to, .port_num = 1, .qkey = 0x1234, .path_mtu = IBV_MTU_1024,
				    .dest_qp_num = peer, .ah_attr = address(), .max_rd_atomic = 4,
				    .max_dest_rd_atomic = 4, .min_rnr_timer = 1, .timeout = 8, .retry_cnt = 1,
				    .rnr_retry = 1 };
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	int mask = IBV_QP_STATE;
	int is_ud = qp->qp_type == IBV_QPT_UD, is_uc = qp->qp_type == IBV_QPT_UC;
	if (to == IBV_QPS_INIT)
		mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | (is_ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
	if (to == IBV_QPS_INIT && qp->qp_type == IBV_QPT_RAW_PACKET)
		mask = IBV_QP_STATE | IBV_QP_PORT;
	if (to == IBV_QPS_RTR && !is_ud && qp->qp_type != IBV_QPT_RAW_PACKET) {
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
		if (!is_uc)
			mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	}
	if (to == IBV_QPS_RTS && qp->qp_type != IBV_QPT_RAW_PACKET) {
		mask |= IBV_QP_SQ_PSN;
		if (!is_ud && !is_uc)
			mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	if (once_in(20))
		mask ^= 1 << below(24);
	ibv_modify_qp(qp, &attr, mask);
}

static void change_qp(void)
{
	struct ibv_qp *qp = any(&qps), *peer = any(&qps);
	if (!qp)
		return;
	for (int tries = 0; tries < 8 && peer->qp_type != qp->qp_type; tries++)
		peer = any(&qps);
	switch (below(8)) {
	case 0: {
		struct ibv_qp_attr attr;
		for (size_t i = 0; i < sizeof attr; i++)
			((uint8_t *)&attr)[i] = (uint8_t)next();
		ibv_modify_qp(qp, &attr, (int)next() & 0x3ffffff);
		break;
	}
	case 1:
		move_qp(qp, below(10), peer->qp_num);
		break;
	case 2: {
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		ibv_query_qp(qp, &attr, (int)next() & 0x3ffffff, &init);
		break;
	}
	case 3: {
		union ibv_gid group = { .raw = { 0xff, 0x12, [15] = (uint8_t)below(4) } };
		if (once_in(2))
			ibv_attach_mcast(qp, &group, 0);
		else
			ibv_detach_mcast(qp, &group, 0);
		break;
	}
	default:
		/* All the way, mostly to a peer that goes it too. */
		move_qp(qp, IBV_QPS_RESET, 0);
		move_qp(qp, IBV_QPS_INIT, 0);
		move_qp(qp, IBV_QPS_RTR, peer->qp_num);
		move_qp(qp, IBV_QPS_RTS, 0);
		if (peer != qp) {
			move_qp(peer, IBV_QPS_RESET, 0);
			move_qp(peer, IBV_QPS_INIT, 0);
			move_qp(peer, IBV_QPS_RTR, qp->qp_num);
			move_qp(peer, IBV_QPS_RTS, 0);
		}
	}
}

static struct ibv_sge sge(void)
{
	struct ibv_mr *mr = any(&mrs);
	struct ibv_sge sge = { .addr = (uintptr_t)arena + below(ARENA), .length = below(5000), .lkey = (uint32_t)next() };
	if (mr && !once_in(12)) {
		sge.lkey = mr->lkey;
		sge.addr = (uintptr_t)mr->addr + (mr->length ? below((uint32_t)mr->length) : 0);
		if (mr->length > 64)
			sge.length = below(once_in(16) ? (uint32_t)mr->length : 64);
	}
	if (once_in(50))
		sge.length = (uint32_t)next();
	return sge;
}

static void send_something(void)
{
	struct ibv_qp *qp = any(&qps), *peer = any(&qps);
	struct ibv_mr *remote = any(&mrs);
	struct ibv_sge list[6];
	struct ibv_send_wr wrs[4], *bad;
	if (!qp)
		return;
	uint32_t count = below(4) + 1;
	for (uint32_t i = 0; i < count; i++) {
		struct ibv_send_wr *wr = &wrs[i];
		memset(wr, 0, sizeof *wr);
		wr->wr_id = next();
		wr->next = i + 1 < count ? wr + 1 : NULL;
		wr->sg_list = list;
		wr->num_sge = once_in(30) ? (int)next() : (int)below(3);
		wr->opcode = once_in(20) ? (uint32_t)next() : below(once_in(4) ? 15 : 7);
		if (qp->qp_type == IBV_QPT_UD && !once_in(8))
			wr->opcode = IBV_WR_SEND;
		wr->send_flags = IBV_SEND_SIGNALED | below(16);
		if (once_in(10) && wr->num_sge >= 0 && wr->num_sge < 3)
			wr->send_flags |= IBV_SEND_INLINE;
		wr->imm_data = (uint32_t)next();
		wr->wr.rdma.remote_addr = remote ? (uintptr_t)remote->addr + below(100) * 8 : next();
		wr->wr.rdma.rkey = remote ? remote->rkey : (uint32_t)next();
		if (qp->qp_type == IBV_QPT_UD) {
			wr->wr.ud.ah = any(&ahs);
			wr->wr.ud.remote_qpn = peer->qp_num;
			wr->wr.ud.remote_qkey = 0x1234;
			if (!wr->wr.ud.ah)
				return;
		} else if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			wr->wr.atomic.compare_add = 1;
			wr->wr.atomic.rkey = remote ? remote->rkey : 0;
		} else if (wr->opcode == IBV_WR_BIND_MW) {
			if (!mws.count || !remote)
				return;
			wr->bind_mw.mw = any(&mws);
			wr->bind_mw.rkey = (uint32_t)next();
			wr->bind_mw.bind_info.mr = remote;
			wr->bind_mw.bind_info.addr = (uintptr_t)remote->addr + below(100);
			wr->bind_mw.bind_info.length = below(5000);
			wr->bind_mw.bind_info.mw_access_flags = (unsigned)random_access();
		} else if (wr->opcode == IBV_WR_TSO) {
			wr->tso.hdr = arena;
			wr->tso.hdr_sz = (uint16_t)below(200);
			wr->tso.mss = (uint16_t)next();
		}
	}
	for (uint32_t i = 0; i < 6; i++)
		list[i] = sge();
	for (uint32_t i = 0; i < count; i++) {
		/* Inline data is read by the call itself. */
		if (!(wrs[i].send_flags & IBV_SEND_INLINE))
			continue;
		for (uint32_t k = 0; k < 6; k++) {
			list[k].addr = (uintptr_t)arena + below(ARENA / 2);
			list[k].length = below(400);
		}
	}
	posted += !ibv_post_send(qp, wrs, &bad);
}

static void receive_something(void)
{
	struct ibv_sge list[4] = { sge(), sge(), sge(), sge() };
	struct ibv_recv_wr wrs[2] = { { .wr_id = next(), .next = &wrs[1], .sg_list = list, .num_sge = (int)below(4) },
				      { .wr_id = next(), .sg_list = list, .num_sge = once_in(20) ? -1 : 1 } };
	struct ibv_recv_wr *bad;
	if (once_in(2)) {
		if (qps.count)
			ibv_post_recv(any(&qps), wrs, &bad);
	} else if (srqs.count) {
		ibv_post_srq_recv(any(&srqs), wrs, &bad);
	}
}

#include "sequence_calls.h"

static void poll_something(void)
{
	struct ibv_wc wc[8];
	struct ibv_cq *cq = any(&cqs);
	struct ibv_cq_ex *ex = any(&cqs_ex);
	int got = cq ? ibv_poll_cq(cq, (int)below(9), wc) : 0;
	CHECK(got >= 0 && got <= 8);
	completed += (unsigned)got;
	for (int i = 0; i < got; i++)
		succeeded += wc[i].status == IBV_WC_SUCCESS;
	struct ibv_poll_cq_attr none = { 0 };
	if (ex && !ibv_start_poll(ex, &none)) {
		do {
			ibv_wc_read_opcode(ex);
			ibv_wc_read_byte_len(ex);
		} while (once_in(2) && !ibv_next_poll(ex));
		ibv_end_poll(ex);
	}
	if (cq)
		ibv_req_notify_cq(cq, (int)below(2));
	if (cq && once_in(8))
		ibv_resize_cq(cq, once_in(4) ? (int)next() : (int)below(300) + 1);
}

static void take_events(void)
{
	struct ibv_comp_channel *channel = any(&channels);
	struct ibv_cq *cq;
	void *cookie;
	while (channel && !ibv_get_cq_event(channel, &cq, &cookie))
		ibv_ack_cq_events(cq, 1), events++;
	struct ibv_async_event event;
	while (!ibv_get_async_event(context, &event))
		ibv_ack_async_event(&event), events++;
}

/* Two queue pairs are connected and say something, as most programs do. */
static void converse(void)
{
	struct ibv_qp *qp = any(&qps), *peer = any(&qps);
	struct ibv_mr *from = NULL, *to = NULL;
	if (!qp || qp->qp_type != peer->qp_type || (qp->qp_type != IBV_QPT_RC && qp->qp_type != IBV_QPT_UC))
		return;
	for (int i = 0; i < mrs.count; i++) {
		struct ibv_mr *mr = mrs.object[i];
		from = mr->pd == qp->pd && mr->length > 64 ? mr : from;
		to = mr->pd == peer->pd && mr->length > 64 ? mr : to;
	}
	if (!from || !to)
		return;
	struct ibv_qp *both[] = { qp, peer };
	for (int i = 0; i < 2; i++) {
		move_qp(both[i], IBV_QPS_RESET, 0);
		move_qp(both[i], IBV_QPS_INIT, 0);
		move_qp(both[i], IBV_QPS_RTR, both[!i]->qp_num);
		move_qp(both[i], IBV_QPS_RTS, 0);
	}
	struct ibv_sge here = { (uintptr_t)from->addr, 64, from->lkey }, there = { (uintptr_t)to->addr, 64, to->lkey };
	struct ibv_recv_wr recv = { .sg_list = &there, .num_sge = 1 }, *bad_recv;
	ibv_post_recv(peer, &recv, &bad_recv);
	struct ibv_send_wr wr = { .sg_list = &here,
				  .num_sge = 1,
				  .opcode = below(5),
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.rdma = { (uintptr_t)to->addr, to->rkey } },
			   *bad;
	posted += !ibv_post_send(qp, &wr, &bad);
}

static void make_channel(void)
{
	if (!has_room(&channels))
		return;
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	CHECK(channel);
	CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
	add(&channels, channel);
}

static void make_ah(void)
{
	struct ibv_ah_attr attr = address();
	if (pds.count && has_room(&ahs))
		add(&ahs, ibv_create_ah(any(&pds), &attr));
}

static void make_window(void)
{
	if (pds.count && has_room(&mws))
		add(&mws, ibv_alloc_mw(any(&pds), below(4)));
}

static void make_device_memory(void)
{
	struct ibv_alloc_dm_attr attr = { .length = once_in(8) ? next() : below(8192),
					  .log_align_req = below(16),
					  .comp_mask = once_in(20) };
	if (has_room(&dms))
		add(&dms, ibv_alloc_dm(context, &attr));
	if (dms.count) {
		ibv_memcpy_to_dm(any(&dms), below(9000), arena, below(9000));
		ibv_memcpy_from_dm(arena, any(&dms), below(9000), below(9000));
	}
}

static void make_xrcd(void)
{
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
					   .fd = once_in(8) ? 9999 : -1,
					   .oflags = once_in(8) ? (int)below(1000) : O_CREAT };
	if (has_room(&xrcds))
		add(&xrcds, ibv_open_xrcd(context, &attr));
}

static void make_wq(void)
{
	struct ibv_wq_init_attr init = { .wq_type = once_in(8) ? 7 : IBV_WQT_RQ,
					 .max_wr = below(40),
					 .max_sge = below(4),
					 .pd = any(&pds),
					 .cq = any_cq() };
	if (!init.pd || !init.cq)
		return;
	if (has_room(&wqs))
		add(&wqs, ibv_create_wq(context, &init));
	if (wqs.count) {
		struct ibv_wq_attr attr = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = below(5) };
		ibv_modify_wq(any(&wqs), &attr);
		struct ibv_wq *table[4] = { any(&wqs), any(&wqs), any(&wqs), any(&wqs) };
		struct ibv_rwq_ind_table_init_attr of = { .log_ind_tbl_size = below(3), .ind_tbl = table };
		if (has_room(&tables))
			add(&tables, ibv_create_rwq_ind_table(context, &of));
	}
}

static void make_flow(void)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
		struct ibv_flow_spec_ipv4 ip;
	} rule = { .attr = { .type = once_in(4) ? below(5) : IBV_FLOW_ATTR_NORMAL,
			     .size = sizeof rule,
			     .priority = (uint16_t)below(4),
			     .num_of_specs = (uint8_t)below(3),
			     .port = once_in(10) ? 9 : 1 },
		   .eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof rule.eth },
		   .ip = { .type = IBV_FLOW_SPEC_IPV4, .size = sizeof rule.ip } };
	memset(rule.eth.mask.dst_mac, once_in(2) ? 0xff : 0, 6);
	if (once_in(8))
		rule.eth.size = (uint16_t)below(100);
	if (once_in(8))
		rule.ip.type = next() & 0x3ff;
	if (qps.count && has_room(&flows))
		add(&flows, ibv_create_flow(any(&qps), &rule.attr));
}

static void make_domain(void)
{
	struct ibv_td_init_attr td = { .comp_mask = once_in(20) };
	if (has_room(&tds))
		add(&tds, ibv_alloc_td(context, &td));
	struct ibv_parent_domain_init_attr of = { .pd = any(&pds), .td = once_in(2) ? any(&tds) : NULL };
	if (of.pd && has_room(&pds))
		add(&pds, ibv_alloc_parent_domain(context, &of));
}

static void make_counters(void)
{
	struct ibv_counters_init_attr attr = { .comp_mask = once_in(20) };
	uint64_t values[4];
	if (has_room(&counters))
		add(&counters, ibv_create_counters(context, &attr));
	if (counters.count)
		ibv_read_counters(any(&counters), values, below(4), below(2));
}

static void ask(void)
{
	struct ibv_device_attr_ex attr;
	struct ibv_port_attr port;
	union ibv_gid other;
	uint16_t pkey;
	ibv_query_device_ex(context, NULL, &attr);
	ibv_query_port(context, (uint8_t)below(4), &port);
	ibv_query_gid(context, (uint8_t)below(3), (int)below(400) - 20, &other);
	ibv_query_pkey(context, (uint8_t)below(3), (int)below(20) - 4, &pkey);
	struct ibv_srq_attr srq = { .max_wr = below(200), .srq_limit = below(40) };
	if (srqs.count) {
		ibv_modify_srq(any(&srqs), &srq, (int)below(8));
		ibv_query_srq(any(&srqs), &srq);
	}
}

static void step(void)
{
	/* Destroyed less often than made, so that there is something to work with. */
	switch (below(once_in(3) ? 40 : 36)) {
	case 0: if (has_room(&pds)) add(&pds, ibv_alloc_pd(context)); break;
	case 1: make_cq(); break;
	case 2: case 3: make_mr(); break;
	case 4: change_mr(); break;
	case 5: make_srq(); break;
	case 6: case 7: make_qp(); break;
	case 8: case 9: case 10: change_qp(); break;
	case 11: case 12: case 13: case 14: case 15: case 16: send_something(); break;
	case 17: case 18: case 19: receive_something(); break;
	case 20: case 21: send_by_functions(); converse(); break;
	case 22: case 23: case 24: poll_something(); break;
	case 25: take_events(); break;
	case 26: make_channel(); break;
	case 27: make_ah(); break;
	case 28: make_window(); break;
	case 29: make_device_memory(); break;
	case 30: make_xrcd(); break;
	case 31: make_wq(); break;
	case 32: make_flow(); break;
	case 33: make_domain(); break;
	case 34: make_counters(); make_comp_cntr(); break;
	case 35: ask(); call_rarely(); break;
	case 36: DESTROY(&mrs, struct ibv_mr, ibv_dereg_mr); DESTROY(&ahs, struct ibv_ah, ibv_destroy_ah); break;
	case 37: DESTROY(&qps, struct ibv_qp, ibv_destroy_qp); DESTROY(&mws, struct ibv_mw, ibv_dealloc_mw); break;
	case 38:
		DESTROY(&cqs, struct ibv_cq, ibv_destroy_cq);
		DESTROY(&srqs, struct ibv_srq, ibv_destroy_srq);
		DESTROY(&pds, struct ibv_pd, ibv_dealloc_pd);
		DESTROY(&flows, struct ibv_flow, ibv_destroy_flow);
		break;
	case 39:
		DESTROY(&channels, struct ibv_comp_channel, ibv_destroy_comp_channel);
		DESTROY(&dms, struct ibv_dm, ibv_free_dm);
		DESTROY(&xrcds, struct ibv_xrcd, ibv_close_xrcd);
		DESTROY(&tables, struct ibv_rwq_ind_table, ibv_destroy_rwq_ind_table);
		DESTROY(&wqs, struct ibv_wq, ibv_destroy_wq);
		DESTROY(&counters, struct ibv_counters, ibv_destroy_counters);
		DESTROY(&tds, struct ibv_td, ibv_dealloc_td);
		DESTROY(&comp_cntrs, struct comp_cntr, ibv_destroy_comp_cntr);
		break;
	}
}

/* A queue pair that belongs to a group is busy. */
static int leave_and_destroy(struct ibv_qp *qp)
{
	for (int i = 0; i < 4; i++) {
		union ibv_gid group = { .raw = { 0xff, 0x12, [15] = (uint8_t)i } };
		while (!ibv_detach_mcast(qp, &group, 0))
			;
	}
	return ibv_destroy_qp(qp);
}

static int destroy_cq_ex(struct ibv_cq_ex *cq)
{
	return ibv_destroy_cq(ibv_cq_ex_to_cq(cq));
}

/* Takes everything away; each round frees what the round before had in use. */
static void end(void)
{
	for (int round = 0; round < 40 * MOST; round++) {
		DESTROY(&flows, struct ibv_flow, ibv_destroy_flow);
		DESTROY(&counters, struct ibv_counters, ibv_destroy_counters);
		DESTROY(&qps, struct ibv_qp, leave_and_destroy);
		DESTROY(&tables, struct ibv_rwq_ind_table, ibv_destroy_rwq_ind_table);
		DESTROY(&wqs, struct ibv_wq, ibv_destroy_wq);
		DESTROY(&comp_cntrs, struct comp_cntr, ibv_destroy_comp_cntr);
		DESTROY(&ahs, struct ibv_ah, ibv_destroy_ah);
		DESTROY(&mws, struct ibv_mw, ibv_dealloc_mw);
		DESTROY(&mrs, struct ibv_mr, ibv_dereg_mr);
		DESTROY(&dms, struct ibv_dm, ibv_free_dm);
		DESTROY(&srqs, struct ibv_srq, ibv_destroy_srq);
		DESTROY(&xrcds, struct ibv_xrcd, ibv_close_xrcd);
		take_events();
		DESTROY(&cqs, struct ibv_cq, ibv_destroy_cq);
		DESTROY(&cqs_ex, struct ibv_cq_ex, destroy_cq_ex);
		DESTROY(&channels, struct ibv_comp_channel, ibv_destroy_comp_channel);
		DESTROY(&pds, struct ibv_pd, ibv_dealloc_pd);
		DESTROY(&tds, struct ibv_td, ibv_dealloc_td);
	}
	const struct pool *all[] = { &pds, &cqs, &cqs_ex, &mrs, &qps, &srqs, &ahs, &channels, &mws,
				     &dms, &xrcds, &wqs, &tables, &flows, &counters, &tds,
				     &comp_cntrs };
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (all[i]->count) {
			printf("%d objects of kind %zu are busy though nothing uses them\n", all[i]->count, i);
			exit(1);
		}
}

/* Opens the device; everything that may wait is told not to. */
static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	CHECK(ibv_query_gid(context, 1, 0, &gid) == 0);
	CHECK(fcntl(context->async_fd, F_SETFL, O_NONBLOCK) == 0);
}

#ifdef FUZZ
int fuzz_sequence(const uint8_t *bytes, size_t length)
{
	if (!context)
		open_device();
	random_state = 1;
	input = bytes;
	left = length;
	while (left)
		step();
	end();
	return 0;
}
#else
static unsigned long steps = 300000, seed = 1;

static void *sequence(void *number)
{
	random_state = (seed + (uintptr_t)number * 1000) * 0x9e3779b97f4a7c15ull + 1;
	for (unsigned long i = 0; i < steps; i++)
		step();
	end();
	printf("%lu objects, %lu sends posted, %lu completions (%lu good), %lu events\n", made, posted, completed,
	       succeeded, events);
	CHECK(steps < 10000 || (made > steps / 50 && posted > steps / 100 && succeeded > 0));
	return NULL;
}

int main(int argc, char **argv)
{
	steps = argc > 1 ? strtoul(argv[1], NULL, 0) : steps;
	seed = argc > 2 ? strtoul(argv[2], NULL, 0) : seed;
	unsigned long threads = argc > 3 ? strtoul(argv[3], NULL, 0) : 1;
	open_device();
	pthread_t others[64];
	CHECK(threads >= 1 && threads <= 64);
	for (unsigned long i = 1; i < threads; i++)
		CHECK(pthread_create(&others[i], NULL, sequence, (void *)i) == 0);
	sequence(NULL);
	for (unsigned long i = 1; i < threads; i++)
		pthread_join(others[i], NULL);
	CHECK(ibv_close_device(context) == 0);
	return 0;
}
#endif
