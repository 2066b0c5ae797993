/* Contexts, protection domains, regions and device memory under further pointers; in other processes: import_shared.c. */
#include <fcntl.h>
#include <unistd.h>
#include "check.h"

static void in_one_process(struct ibv_context *ctx)
{
	struct ibv_context *twin = ibv_import_device(dup(ctx->cmd_fd));
	TRUE(twin && twin != ctx);
	TRUE(twin->device == ctx->device);
	TRUE(twin->async_fd != ctx->async_fd);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_pd *same = ibv_import_pd(twin, pd->handle);
	TRUE(same && same != pd && same->context == twin);
	EQ(same->handle, pd->handle);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(same, IBV_QPT_RC);
	connect_ends(&a, &b);
	/* Keys of the one are good in the other: it is one protection domain. */
	struct ibv_mr *mr = ibv_import_mr(same, a.mr->handle);
	TRUE(mr && mr->addr == NULL && mr->pd == same);
	EQ(mr->lkey, a.mr->lkey);
	EQ(mr->rkey, a.mr->rkey);
	EQ(mr->length, BUF);
	memcpy(a.buf, "imported", 8);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)a.buf + 64, mr->rkey } }, *bad;
	OK(ibv_post_send(b.qp, &wr, &bad));
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	OK(memcmp(a.buf + 64, "imported", 8));
	/* An import goes without the region, the region without its imports. */
	ibv_unimport_mr(mr);
	REFUSES(ibv_dereg_mr(mr), EINVAL);
	mr = ibv_import_mr(same, a.mr->handle);
	REFUSES(ibv_dealloc_pd(same), EBUSY);
	free_end(&a), free_end(&b);
	REFUSES(ibv_dereg_mr(mr), EINVAL);
	ibv_unimport_mr(mr);
	ibv_unimport_pd(same);

	struct ibv_alloc_dm_attr attr = { .length = 64 };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &attr), *other = ibv_import_dm(twin, dm->handle);
	TRUE(other && other->context == twin);
	char data[64] = "shared", back[64];
	OK(ibv_memcpy_to_dm(dm, 0, data, 64));
	OK(ibv_memcpy_from_dm(back, other, 0, 64));
	OK(memcmp(data, back, 64));
	ibv_unimport_dm(other);
	OK(ibv_memcpy_from_dm(back, dm, 0, 64));
	OK(memcmp(data, back, 64));
	other = ibv_import_dm(twin, dm->handle);
	OK(ibv_free_dm(other));
	REFUSES(ibv_free_dm(dm), EINVAL);

	IS_NULL(ibv_import_pd(twin, 0x12345678), ENOENT);
	IS_NULL(ibv_import_pd(NULL, pd->handle), EINVAL);
	IS_NULL(ibv_import_mr(pd, 0x12345678), ENOENT);
	IS_NULL(ibv_import_dm(twin, 0x12345678), EINVAL);
	IS_NULL(ibv_import_device(-1), EBADF);
	IS_NULL(ibv_import_device(ctx->cmd_fd), EINVAL);
	int null = open("/dev/null", O_RDWR);
	IS_NULL(ibv_import_device(null), EINVAL);
	TRUE(fcntl(null, F_GETFD) >= 0);
	close(null);
	/* A handle of another context's names nothing here. */
	struct ibv_context *stranger = open_device();
	IS_NULL(ibv_import_pd(stranger, pd->handle), ENOENT);
	OK(ibv_close_device(stranger));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(twin));
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	in_one_process(ctx);
	OK(ibv_close_device(ctx));
	return 0;
}
