/* Programs of mistakes.c that end or change objects too early, or events too often. */

/* The completion of a send lies in the completion queue when its region and its queue pair end. Wrong: it cannot come yet. */
static void ended_before_a_poll(struct end *a, struct end *b)
{
	struct end other = *a;
	other.buf = calloc(1, 64);
	other.mr = ibv_reg_mr(a->mr->pd, other.buf, 64, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_cq *cq = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	other.qp = make_qp(a->mr->pd, cq, IBV_QPT_RC, NULL, 0);
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(b->qp, &reset, IBV_QP_STATE));
	connect_ends(&other, b);
	if (!wrong)
		OK(post_recv(b, 1, 64));
	OK(post_send(&other, 2, 8, IBV_SEND_SIGNALED));
	if (!wrong)
		OK(status_of_next(b));
	usleep(300000);
	OK(ibv_dereg_mr(other.mr));
	OK(ibv_destroy_qp(other.qp));
	OK(ibv_destroy_cq(cq));
	free(other.buf);
}

/* As above, with the receive of the other side. */
static void received_before_a_poll(struct end *a, struct end *b)
{
	struct end other = *b;
	other.buf = calloc(1, 64);
	other.mr = ibv_reg_mr(b->mr->pd, other.buf, 64, IBV_ACCESS_LOCAL_WRITE);
	OK(post_recv(&other, 1, 64));
	if (wrong)
		OK(post_recv(&other, 1, 64));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(a));
	usleep(300000);
	OK(ibv_dereg_mr(other.mr));
	free(other.buf);
}

static void changed_with_work(struct end *a, struct end *b)
{
	(void)a;
	OK(post_recv(b, 1, 64));
	if (!wrong)
		to_err(b->qp);
	static char other[64];
	OK(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, other, sizeof other, 0));
}
