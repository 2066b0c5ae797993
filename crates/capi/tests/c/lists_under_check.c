/*
 * Calls that the device refuses, and that the checker must not take for others.
 *
 *   lists_under_check count|failed|null
 */
#include "check.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

static struct end a, b;

static struct ibv_qp_ex *begin(struct ibv_pd *pd)
{
	a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	OK(ibv_destroy_qp(a.qp));
	struct ibv_qp_init_attr_ex init = { .send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND };
	a.qp = ibv_create_qp_ex(pd->context, &init);
	TRUE(a.qp != NULL);
	connect_ends(&a, &b);
	return ibv_qp_to_qp_ex(a.qp);
}

/* A count that no list has. The device refuses it, and reads nothing. */
static void count(struct ibv_qp_ex *qp)
{
	size_t page = sysconf(_SC_PAGESIZE);
	char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	TRUE(memory != MAP_FAILED);
	OK(munmap(memory + page, page));
	struct ibv_data_buf *last = (struct ibv_data_buf *)(memory + page) - 1;
	last->addr = a.buf;
	last->length = 8;
	ibv_wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_inline_data_list(qp, (size_t)-1, last);
	REFUSES(ibv_wr_complete(qp), EINVAL);
}

/* The queue pair takes no WRITE, so the row has failed: the inline data is for no request. */
static void failed(struct ibv_qp_ex *qp)
{
	ibv_wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_inline_data(qp, a.buf, 8);
	ibv_wr_rdma_write(qp, 0, 0);
	ibv_wr_set_inline_data(qp, a.buf, 128);
	TRUE(ibv_wr_complete(qp) != 0);
}

/* No queue pair has the address 0, so the queue pairs without an SRQ have none there. */
static void null(void)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 64, .lkey = a.mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	TRUE(a.qp->context->ops.post_recv(NULL, &wr, &bad) != 0);
	OK(post_recv(&a, 1, 64));
	/* A mistake. */
	OK(ibv_dereg_mr(a.mr));
	a.mr = ibv_reg_mr(a.qp->pd, a.buf, BUF, IBV_ACCESS_LOCAL_WRITE);
}

int main(int argc, char **argv)
{
	TRUE(argc == 2);
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_qp_ex *qp = begin(pd);
	if (strcmp(argv[1], "count") == 0)
		count(qp);
	else if (strcmp(argv[1], "failed") == 0)
		failed(qp);
	else
		null();
	free_end(&a), free_end(&b);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
