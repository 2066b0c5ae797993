/* Programs with one mistake each, which the checker finds, and programs that look like them and are right. The first argument
 * is the name of the check, the second "wrong" or "right". */
#include "check.h"

static bool wrong;

/* Sends a datagram from one queue pair to the other, by this address handle. */
static void send_datagram(struct end *e, uint32_t dest, struct ibv_ah *ah)
{
	struct ibv_sge sge = { .addr = (uintptr_t)e->buf, .length = 8, .lkey = e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.ud = { .ah = ah, .remote_qpn = dest, .remote_qkey = 0x11111111 } }, *bad;
	OK(ibv_post_send(e->qp, &wr, &bad));
}

static void qp_destroyed_with_work(struct end *a, struct end *b)
{
	OK(post_recv(b, 1, 64));
	OK(post_recv(b, 2, 64));
	OK(post_send(a, 3, 8, 0));
	/* Right: its completion says that the unsignaled one before it is complete, too. */
	OK(post_send(a, 4, 8, wrong ? 0 : IBV_SEND_SIGNALED));
	if (!wrong)
		OK(poll_one(a->cq).status);
}

static void mr_deregistered_with_work(struct end *a, struct end *b)
{
	struct end other = *a;
	other.buf = calloc(1, 64);
	other.mr = ibv_reg_mr(a->mr->pd, other.buf, 64, IBV_ACCESS_LOCAL_WRITE);
	OK(post_recv(b, 1, 64));
	OK(post_send(&other, 2, 8, IBV_SEND_SIGNALED | (wrong ? 0 : IBV_SEND_INLINE)));
	OK(ibv_dereg_mr(other.mr));
	OK(poll_one(a->cq).status);
	free(other.buf);
}

static void ah_destroyed_with_work(struct end *a, struct end *b)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	attr.grh.dgid = own_gid(a->qp->context);
	struct ibv_ah *ah = ibv_create_ah(a->mr->pd, &attr);
	TRUE(ah != NULL);
	OK(post_recv(b, 1, 64));
	send_datagram(a, b->qp->qp_num, ah);
	if (wrong)
		OK(ibv_destroy_ah(ah));
	OK(poll_one(a->cq).status);
	if (!wrong)
		OK(ibv_destroy_ah(ah));
}

static void buffer_changed(struct end *a, struct end *b)
{
	OK(post_recv(b, 1, 64));
	OK(post_send(a, 2, 8, IBV_SEND_SIGNALED | (wrong ? 0 : IBV_SEND_INLINE)));
	a->buf[3] = 7;
	OK(poll_one(a->cq).status);
}

static void ud_receive_without_grh(struct end *a, struct end *b)
{
	(void)a;
	OK(post_recv(b, 1, wrong ? 39 : 40));
}

static void inline_too_long(struct end *a, struct end *b)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(a->qp, &attr, IBV_QP_CAP, &init));
	OK(post_recv(b, 1, 4096));
	int ret = post_send(a, 2, init.cap.max_inline_data + wrong, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
	if (!ret)
		OK(poll_one(a->cq).status);
}

/* Posts until the queue is full, and then as much again. */
static void send_queue_unsignaled(struct end *a, struct end *b)
{
	for (int n = 0; n < 8; n++)
		OK(post_recv(b, n, 64));
	int ret = 0;
	/* Right: every fourth is signaled, so that its completion gives back the room of four. */
	for (int n = 0; !ret; n++)
		ret = post_send(a, n, 8, !wrong && n % 4 == 3 ? IBV_SEND_SIGNALED : 0);
	EQ(ret, ENOMEM);
	if (!wrong) {
		OK(poll_one(a->cq).status);
		OK(post_send(a, 99, 0, IBV_SEND_SIGNALED));
	}
	to_err(a->qp);
}

static void leak(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_cq *cq = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	TRUE(cq != NULL);
	if (!wrong)
		OK(ibv_destroy_cq(cq));
}

int main(int argc, char **argv)
{
	TRUE(argc == 3);
	wrong = !strcmp(argv[2], "wrong");
	static const struct {
		const char *name;
		enum ibv_qp_type type;
		void (*run)(struct end *a, struct end *b);
	} all[] = {
		{ "qp-destroyed-with-work", IBV_QPT_RC, qp_destroyed_with_work },
		{ "mr-deregistered-with-work", IBV_QPT_RC, mr_deregistered_with_work },
		{ "ah-destroyed-with-work", IBV_QPT_UD, ah_destroyed_with_work },
		{ "buffer-changed", IBV_QPT_RC, buffer_changed },
		{ "ud-receive-without-grh", IBV_QPT_UD, ud_receive_without_grh },
		{ "inline-too-long", IBV_QPT_RC, inline_too_long },
		{ "send-queue-unsignaled", IBV_QPT_RC, send_queue_unsignaled },
		{ "leak", IBV_QPT_RC, leak },
	};
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	for (size_t n = 0; n < sizeof all / sizeof *all; n++) {
		if (strcmp(all[n].name, argv[1]))
			continue;
		struct end a = make_end(pd, all[n].type), b = make_end(pd, all[n].type);
		connect_ends(&a, &b);
		all[n].run(&a, &b);
		free_end(&a), free_end(&b);
		OK(ibv_dealloc_pd(pd));
		OK(ibv_close_device(ctx));
		return 0;
	}
	return 2;
}
