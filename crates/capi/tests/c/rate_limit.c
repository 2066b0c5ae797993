/* How fast a queue pair sends at most; what the port says of its speed and its neighbours. */
#include "check.h"

/* The headers of rdma-core 44 do not have it. */
int ibv_query_port_speed(struct ibv_context *, uint32_t, uint64_t *);

static struct ibv_context *ctx;
static struct ibv_pd *pd;

/* Seconds for `count` messages of `len` bytes. */
static double timed(struct end *a, struct end *b, struct ibv_ah *ah, int count, uint32_t len)
{
	double begin = now();
	int posted = 0, sent = 0, received = 0, ready = 0;
	while (sent < count || received < count) {
		while (ready < count && ready - received < 8)
			OK(post_recv(b, ready++, len + 40));
		while (posted < count && posted - sent < 8 && posted < ready) {
			struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = len, .lkey = a->mr->lkey };
			struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				.send_flags = IBV_SEND_SIGNALED }, *bad;
			if (ah) {
				wr.wr.ud.ah = ah;
				wr.wr.ud.remote_qpn = b->qp->qp_num;
				wr.wr.ud.remote_qkey = 0x11111111;
			}
			OK(ibv_post_send(a->qp, &wr, &bad));
			posted++;
		}
		struct ibv_wc wc;
		if (ibv_poll_cq(a->cq, 1, &wc) == 1) {
			EQ(wc.status, IBV_WC_SUCCESS);
			sent++;
		}
		if (ibv_poll_cq(b->cq, 1, &wc) == 1) {
			EQ(wc.status, IBV_WC_SUCCESS);
			received++;
		}
		TRUE(now() - begin < 30);
	}
	return now() - begin;
}

/* `rate` in kbit/s: what the host does without a limit, busy as it may be, is far above. */
static void paces(enum ibv_qp_type type, uint32_t len, int count, uint32_t rate)
{
	struct end a = make_end(pd, type), b = make_end(pd, type);
	connect_ends(&a, &b);
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(ctx), .hop_limit = 9 } };
	struct ibv_ah *ah = type == IBV_QPT_UD ? ibv_create_ah(pd, &ah_attr) : NULL;
	struct ibv_qp_rate_limit_attr limit = { .rate_limit = rate, .max_burst_sz = 8192 };
	OK(ibv_modify_qp_rate_limit(a.qp, &limit));
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_RATE_LIMIT, &init));
	EQ(attr.rate_limit, rate);
	double took = timed(&a, &b, ah, count, len), least = (count * (double)len - 8192) / (rate * 125.0);
	TRUE(took >= least);
	/* On a busy host it may take longer, but it is not another order of magnitude. */
	TRUE(took < 10 * least + 0.5);
	/* The limit goes: what it never lets through so soon arrives, as soon as the host has time for it. */
	limit = (struct ibv_qp_rate_limit_attr){ 0 };
	OK(ibv_modify_qp_rate_limit(a.qp, &limit));
	double until = now() + 20;
	while (timed(&a, &b, ah, count, len) >= least)
		TRUE(now() < until);
	/* By ibv_modify_qp, too. */
	attr = (struct ibv_qp_attr){ .rate_limit = rate };
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_RATE_LIMIT));
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_RATE_LIMIT, &init));
	EQ(attr.rate_limit, rate);
	if (ah)
		OK(ibv_destroy_ah(ah));
	free_end(&a), free_end(&b);
}

static void refusals(void)
{
	struct ibv_device_attr_ex caps;
	OK(ibv_query_device_ex(ctx, NULL, &caps));
	EQ(caps.packet_pacing_caps.qp_rate_limit_min, 1);
	TRUE(ibv_is_qpt_supported(caps.packet_pacing_caps.supported_qpts, IBV_QPT_RC));
	struct end a = make_end(pd, IBV_QPT_RC);
	struct ibv_qp_rate_limit_attr limit = { .rate_limit = caps.packet_pacing_caps.qp_rate_limit_max + 1 };
	EQ(ibv_modify_qp_rate_limit(a.qp, &limit), EINVAL);
	limit = (struct ibv_qp_rate_limit_attr){ .rate_limit = 1000, .comp_mask = 1 };
	EQ(ibv_modify_qp_rate_limit(a.qp, &limit), EINVAL);
	EQ(ibv_modify_qp_rate_limit(a.qp, NULL), EINVAL);
	free_end(&a);
}

static void port(void)
{
	uint64_t speed = 0;
	OK(ibv_query_port_speed(ctx, 1, &speed));
	EQ(speed, 1000);
	REFUSES(ibv_query_port_speed(ctx, 2, &speed), EINVAL);
	REFUSES(ibv_query_port_speed(ctx, 257, &speed), EINVAL);
	REFUSES(ibv_query_port_speed(ctx, 1, NULL), EINVAL);
	/* Of the host itself, and of a group. */
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh.dgid = own_gid(ctx) };
	uint8_t mac[6] = { 1, 1, 1, 1, 1, 1 };
	uint16_t vid = 7;
	OK(ibv_resolve_eth_l2_from_gid(ctx, &attr, mac, &vid));
	EQ(mac[0] & 1, 0);
	EQ(vid, 0xffff);
	memset(attr.grh.dgid.raw, 0, 16);
	memcpy(attr.grh.dgid.raw + 10, "\xff\xff\xef\x81\x02\x03", 6);
	OK(ibv_resolve_eth_l2_from_gid(ctx, &attr, mac, NULL));
	EQ(memcmp(mac, "\x01\x00\x5e\x01\x02\x03", 6), 0);
	attr.grh.sgid_index = 127;
	EQ(ibv_resolve_eth_l2_from_gid(ctx, &attr, mac, NULL), -EINVAL);
	EQ(ibv_resolve_eth_l2_from_gid(ctx, NULL, mac, NULL), -EINVAL);
}

int main(void)
{
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	paces(IBV_QPT_RC, 20000, 100, 80000);
	paces(IBV_QPT_UD, 500, 800, 16000);
	refusals();
	port();
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
