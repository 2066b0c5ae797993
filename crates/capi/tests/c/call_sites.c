/* Calls that a script lets fail if they come from a function, an object or a place: and no others. */
#include "check.h"

static char memory[4096];

/* Each keeps its frame: what stands behind the call needs it. */
__attribute__((noinline)) static struct ibv_mr *setup(struct ibv_pd *pd)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	__asm__ volatile("" ::: "memory");
	return mr;
}

__attribute__((noinline)) static struct ibv_mr *begin(struct ibv_pd *pd)
{
	struct ibv_mr *mr = setup(pd);
	__asm__ volatile("" ::: "memory");
	return mr;
}

__attribute__((noinline)) static struct ibv_mr *grow(struct ibv_pd *pd)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	__asm__ volatile("" ::: "memory");
	return mr;
}

__attribute__((noinline)) static int send_one(struct end *end)
{
	struct ibv_send_wr wr = { .wr_id = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	int ret = ibv_post_send(end->qp, &wr, &bad);
	__asm__ volatile("" ::: "memory");
	return ret;
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	/* The first call from `setup` is the third of all. */
	for (int i = 0; i < 2; i++) {
		struct ibv_mr *mr = grow(pd);
		TRUE(mr != NULL);
		OK(ibv_dereg_mr(mr));
	}
	IS_NULL(setup(pd), EFAULT);
	struct ibv_mr *mr = grow(pd);
	TRUE(mr != NULL);
	OK(ibv_dereg_mr(mr));
	mr = setup(pd);
	TRUE(mr != NULL);
	OK(ibv_dereg_mr(mr));
	/* By way of another function; the second one from there. */
	mr = begin(pd);
	TRUE(mr != NULL);
	OK(ibv_dereg_mr(mr));
	IS_NULL(begin(pd), ENOMEM);
	/* The posting calls, which the program makes by a table. */
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	OK(post_recv(&b, 1, 64));
	EQ(send_one(&a), EAGAIN);
	OK(send_one(&a));
	EQ(poll_one(a.cq).wr_id, 1);
	free_end(&a), free_end(&b);
	/* Any call from the program's own object; none comes from another. */
	IS_NULL(ibv_create_comp_channel(ctx), EMFILE);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
