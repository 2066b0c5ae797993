/* Memory that a script of faults lets vanish for the device: a request that touches the page fails, and the program still has it. */
#include "check.h"

static const uint32_t INJECTED = 9901;

static void write_from(struct end *a, struct end *b, size_t at)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf + at, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = at,
				  .sg_list = &sge,
				  .num_sge = 1,
				  .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.rdma = { .remote_addr = (uintptr_t)b->buf, .rkey = b->mr->rkey } },
			   *bad;
	OK(ibv_post_send(a->qp, &wr, &bad));
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	/* The region of `a` is the first one. */
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	write_from(&a, &b, 0);
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	/* The third page begins here, wherever the buffer begins. */
	size_t page = 2 * 4096 - (uintptr_t)a.buf % 4096;
	memset(a.buf + page, 7, 4096);
	write_from(&a, &b, page);
	struct ibv_wc wc = poll_one(a.cq);
	EQ(wc.status, IBV_WC_LOC_PROT_ERR);
	EQ(wc.vendor_err, INJECTED);
	EQ(a.buf[page], 7);
	free_end(&a), free_end(&b);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
