/* Extended completion queues: fields, clocks, options, moderation, overrun, several pollers. */
#include "check.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>

static struct ibv_context *ctx;
static struct ibv_pd *pd;

static struct ibv_cq_ex *make(struct ibv_cq_init_attr_ex a)
{
	struct ibv_cq_ex *cq = ibv_create_cq_ex(ctx, &a);
	TRUE(cq != NULL);
	return cq;
}

/* A pair of queue pairs of which `a` completes in `cq`. */
static void make_pair(struct end *a, struct end *b, struct ibv_cq *cq, enum ibv_qp_type type)
{
	*a = make_end(pd, type), *b = make_end(pd, type);
	OK(ibv_destroy_qp(a->qp));
	OK(ibv_destroy_cq(a->cq));
	a->cq = cq;
	a->qp = make_qp(pd, cq, type, NULL, 0);
	connect_ends(a, b);
}

static void start(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = { 0 };
	double until = now() + 10;
	int ret;
	while ((ret = ibv_start_poll(cq, &attr)) == ENOENT)
		TRUE(now() < until);
	EQ(ret, 0);
}

static uint64_t raw_clock(void)
{
	struct ibv_values_ex v = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	OK(ibv_query_rt_values_ex(ctx, &v));
	EQ(v.comp_mask, IBV_VALUES_MASK_RAW_CLOCK);
	return v.raw_clock.tv_sec * 1000000000ull + v.raw_clock.tv_nsec;
}

static void fields(void)
{
	struct ibv_device_attr_ex caps;
	OK(ibv_query_device_ex(ctx, NULL, &caps));
	EQ(caps.completion_timestamp_mask, -1);
	EQ(caps.hca_core_clock, 1000000);
	EQ(caps.cq_mod_caps.max_cq_count, 65535);
	EQ(caps.cq_mod_caps.max_cq_period, 65535);

	struct ibv_cq_ex *cq = make((struct ibv_cq_init_attr_ex){ .cqe = 32, .wc_flags = IBV_CREATE_CQ_SUP_WC_FLAGS,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, .flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED });
	struct end a, b;
	make_pair(&a, &b, ibv_cq_ex_to_cq(cq), IBV_QPT_UD);
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1, .sl = 3, .grh = { .dgid = own_gid(ctx), .hop_limit = 9 } };
	struct ibv_ah *ah = ibv_create_ah(pd, &ah_attr);
	TRUE(ah != NULL);
	OK(post_recv(&a, 11, 1000));
	OK(post_recv(&a, 12, 1000));
	uint64_t before = raw_clock();
	struct timespec wall;
	clock_gettime(CLOCK_REALTIME, &wall);
	uint64_t wall_before = wall.tv_sec * 1000000000ull + wall.tv_nsec;
	for (int i = 0; i < 2; i++) {
		struct ibv_sge sge = { .addr = (uintptr_t)b.buf, .length = 100, .lkey = b.mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htobe32(77),
			.wr.ud = { .ah = ah, .remote_qpn = a.qp->qp_num, .remote_qkey = 0x11111111 } }, *bad;
		OK(ibv_post_send(b.qp, &wr, &bad));
	}
	uint64_t last = before, wall_last = wall_before;
	start(cq);
	for (int i = 0;; i++) {
		EQ(cq->status, IBV_WC_SUCCESS);
		EQ(cq->wr_id, 11 + i);
		EQ(ibv_wc_read_opcode(cq), IBV_WC_RECV);
		EQ(ibv_wc_read_byte_len(cq), 140);
		EQ(be32toh(ibv_wc_read_imm_data(cq)), 77);
		EQ(ibv_wc_read_wc_flags(cq), IBV_WC_GRH | IBV_WC_WITH_IMM);
		EQ(ibv_wc_read_qp_num(cq), a.qp->qp_num);
		EQ(ibv_wc_read_src_qp(cq), b.qp->qp_num);
		EQ(ibv_wc_read_slid(cq), 0);
		EQ(ibv_wc_read_dlid_path_bits(cq), 0);
		EQ(ibv_wc_read_cvlan(cq), 0);
		EQ(ibv_wc_read_flow_tag(cq), 0);
		EQ(ibv_wc_read_vendor_err(cq), 0);
		struct ibv_wc_tm_info tm = { 1, 1 };
		ibv_wc_read_tm_info(cq, &tm);
		TRUE(tm.tag == 0 && tm.priv == 0);
		uint64_t ts = ibv_wc_read_completion_ts(cq), w = ibv_wc_read_completion_wallclock_ns(cq);
		TRUE(ts >= last && ts <= raw_clock());
		TRUE(w >= wall_last && w < wall_before + 10000000000ull);
		last = ts, wall_last = w;
		if (i == 1)
			break;
		double until = now() + 10;
		int ret;
		while ((ret = ibv_next_poll(cq)) == ENOENT)
			TRUE(now() < until);
		EQ(ret, 0);
	}
	EQ(ibv_next_poll(cq), ENOENT);
	ibv_end_poll(cq);
	/* ibv_poll_cq takes them too. */
	OK(post_recv(&a, 13, 1000));
	to_err(a.qp);
	struct ibv_wc wc = poll_one(ibv_cq_ex_to_cq(cq));
	EQ(wc.wr_id, 13);
	OK(ibv_destroy_ah(ah));
	free_end(&a), free_end(&b);
}

static void refusals(void)
{
	struct ibv_cq_init_attr_ex a = { .cqe = 8 };
	a.wc_flags = 1 << 12;
	IS_NULL(ibv_create_cq_ex(ctx, &a), EOPNOTSUPP);
	a.wc_flags = 0, a.comp_mask = 4;
	IS_NULL(ibv_create_cq_ex(ctx, &a), EINVAL);
	a.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, a.flags = 4;
	IS_NULL(ibv_create_cq_ex(ctx, &a), EINVAL);
	a.flags = 0, a.cqe = 0;
	IS_NULL(ibv_create_cq_ex(ctx, &a), EINVAL);
	a.cqe = 8, a.comp_vector = ctx->num_comp_vectors;
	IS_NULL(ibv_create_cq_ex(ctx, &a), EINVAL);
	/* A plain protection domain is no parent domain. */
	a.comp_vector = 0, a.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
	IS_NULL(ibv_create_cq_ex(ctx, &a), EINVAL);
	a.parent_domain = pd;
	IS_NULL(ibv_create_cq_ex(ctx, &a), EINVAL);

	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_modify_cq_attr m = { .attr_mask = IBV_CQ_ATTR_RESERVED };
	EQ(ibv_modify_cq(cq, &m), EINVAL);
	EQ(ibv_modify_cq(cq, NULL), EINVAL);
	m.attr_mask = 0;
	OK(ibv_modify_cq(cq, &m));
	struct ibv_values_ex v = { .comp_mask = ~0u };
	OK(ibv_query_rt_values_ex(ctx, &v));
	EQ(v.comp_mask, IBV_VALUES_MASK_RAW_CLOCK);
	EQ(ibv_query_rt_values_ex(ctx, NULL), EINVAL);
	OK(ibv_destroy_cq(cq));
}

static void ignores_overrun(void)
{
	struct ibv_cq_ex *cq = make((struct ibv_cq_init_attr_ex){ .cqe = 4, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN });
	struct end a, b;
	make_pair(&a, &b, ibv_cq_ex_to_cq(cq), IBV_QPT_RC);
	for (int i = 0; i < 8; i++)
		OK(post_recv(&b, i, 64));
	for (int i = 0; i < 8; i++)
		OK(post_send(&a, i, 64, IBV_SEND_SIGNALED));
	for (int i = 0; i < 8; i++)
		EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	/* The last ones, and all slots of the send queue are free again once they are polled. */
	double until = now() + 10;
	struct ibv_wc wc;
	do {
		wc = poll_one(ibv_cq_ex_to_cq(cq));
		EQ(wc.status, IBV_WC_SUCCESS);
		TRUE(now() < until);
	} while (wc.wr_id != 7);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init));
	EQ(attr.qp_state, IBV_QPS_RTS);
	for (int i = 0; i < 8; i++)
		OK(post_send(&a, i, 0, 0));
	free_end(&a), free_end(&b);
}

static void overrun(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 2, NULL, NULL, 0);
	struct end a, b;
	make_pair(&a, &b, cq, IBV_QPT_RC);
	struct ibv_qp *other = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	for (int i = 0; i < 3; i++)
		OK(post_recv(&b, i, 64));
	for (int i = 0; i < 3; i++)
		OK(post_send(&a, i, 64, IBV_SEND_SIGNALED));
	for (int i = 0; i < 3; i++)
		EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	/* The CQ, then both queue pairs that are attached to it. */
	int fatal = 0;
	for (int i = 0; i < 3; i++) {
		struct ibv_async_event e;
		OK(ibv_get_async_event(ctx, &e));
		if (i == 0) {
			EQ(e.event_type, IBV_EVENT_CQ_ERR);
			TRUE(e.element.cq == cq);
		} else {
			EQ(e.event_type, IBV_EVENT_QP_FATAL);
			fatal |= e.element.qp == a.qp ? 1 : e.element.qp == other ? 2 : 4;
		}
		ibv_ack_async_event(&e);
	}
	EQ(fatal, 3);
	EQ(ibv_resize_cq(cq, 1), EINVAL);
	EQ(poll_one(cq).wr_id, 0);
	EQ(poll_one(cq).wr_id, 1);
	struct ibv_wc wc;
	EQ(ibv_poll_cq(cq, 1, &wc), 0);
	OK(ibv_destroy_qp(other));
	free_end(&a), free_end(&b);
}

static void moderation(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ctx);
	TRUE(channel != NULL);
	struct ibv_cq *cq = ibv_create_cq(ctx, 32, NULL, channel, 0);
	struct end a, b;
	make_pair(&a, &b, cq, IBV_QPT_RC);
	struct pollfd pfd = { .fd = channel->fd, .events = POLLIN };
	struct ibv_modify_cq_attr m = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { .cq_count = 3 } };
	OK(ibv_modify_cq(cq, &m));
	for (int i = 0; i < 8; i++)
		OK(post_recv(&a, i, 64));
	OK(ibv_req_notify_cq(cq, 0));
	/* Two are not enough, the third is. */
	for (int i = 0; i < 2; i++) {
		OK(post_send(&b, i, 8, IBV_SEND_SIGNALED));
		EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	}
	EQ(poll(&pfd, 1, 50), 0);
	OK(post_send(&b, 2, 8, IBV_SEND_SIGNALED));
	EQ(poll(&pfd, 1, 10000), 1);
	struct ibv_cq *told;
	void *context;
	OK(ibv_get_cq_event(channel, &told, &context));
	TRUE(told == cq);
	ibv_ack_cq_events(cq, 1);
	for (int i = 0; i < 3; i++)
		EQ(poll_one(cq).wr_id, i);
	/* One, after 40 ms. */
	m.moderate.cq_count = 100, m.moderate.cq_period = 40000;
	OK(ibv_modify_cq(cq, &m));
	OK(ibv_req_notify_cq(cq, 0));
	double begin = now();
	OK(post_send(&b, 3, 8, 0));
	EQ(poll(&pfd, 1, 10000), 1);
	double took = now() - begin;
	TRUE(took >= 0.039 && took < 5);
	OK(ibv_get_cq_event(channel, &told, &context));
	ibv_ack_cq_events(cq, 1);
	EQ(poll_one(cq).wr_id, 3);
	/* None: at once. */
	m.moderate.cq_count = m.moderate.cq_period = 0;
	OK(ibv_modify_cq(cq, &m));
	OK(ibv_req_notify_cq(cq, 0));
	OK(post_send(&b, 4, 8, 0));
	EQ(poll(&pfd, 1, 10000), 1);
	OK(ibv_get_cq_event(channel, &told, &context));
	ibv_ack_cq_events(cq, 1);
	free_end(&a), free_end(&b);
	OK(ibv_destroy_comp_channel(channel));
}

enum { POLLERS = 4, MESSAGES = 2000 };
static struct ibv_cq_ex *shared;
static int seen[MESSAGES], total;

static void *poller(void *unused)
{
	(void)unused;
	struct ibv_poll_cq_attr attr = { 0 };
	double until = now() + 60;
	while (__atomic_load_n(&total, __ATOMIC_RELAXED) < MESSAGES) {
		TRUE(now() < until);
		int ret = ibv_start_poll(shared, &attr);
		if (ret == ENOENT)
			continue;
		EQ(ret, 0);
		do {
			EQ(shared->status, IBV_WC_SUCCESS);
			uint64_t id = shared->wr_id;
			EQ(ibv_wc_read_byte_len(shared), id % 60 + 1);
			__atomic_fetch_add(&seen[id], 1, __ATOMIC_RELAXED);
			__atomic_fetch_add(&total, 1, __ATOMIC_RELAXED);
		} while (ibv_next_poll(shared) == 0);
		ibv_end_poll(shared);
	}
	return NULL;
}

static void several_pollers(void)
{
	shared = make((struct ibv_cq_init_attr_ex){ .cqe = 32, .wc_flags = IBV_WC_STANDARD_FLAGS });
	struct end a, b;
	make_pair(&a, &b, ibv_cq_ex_to_cq(shared), IBV_QPT_RC);
	pthread_t threads[POLLERS];
	for (int i = 0; i < POLLERS; i++)
		OK(pthread_create(&threads[i], NULL, poller, NULL));
	for (int i = 0; i < MESSAGES; i++) {
		/* The queue holds what is not polled yet. */
		while (__atomic_load_n(&total, __ATOMIC_RELAXED) + 8 <= i)
			sched_yield();
		OK(post_recv(&a, i, 64));
		OK(post_send(&b, i, i % 60 + 1, IBV_SEND_SIGNALED));
		EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	}
	for (int i = 0; i < POLLERS; i++)
		OK(pthread_join(threads[i], NULL));
	for (int i = 0; i < MESSAGES; i++)
		EQ(seen[i], 1);
	free_end(&a), free_end(&b);
}

int main(void)
{
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	fields();
	refusals();
	ignores_overrun();
	overrun();
	moderation();
	several_pollers();
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
