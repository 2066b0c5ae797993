/* Contexts, protection domains, regions and device memory under further pointers, here and in another process. */
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
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

/* What the other process does with the descriptor and the handles. */
static void child(int fd, uint32_t pd_handle, uint32_t dm_handle)
{
	struct ibv_context *ctx = ibv_import_device(fd);
	TRUE(ctx != NULL);
	struct ibv_device_attr attr;
	OK(ibv_query_device(ctx, &attr));
	IS_NULL(ibv_import_pd(ctx, pd_handle), EOPNOTSUPP);
	struct ibv_dm *dm = ibv_import_dm(ctx, dm_handle);
	TRUE(dm != NULL);
	char back[16];
	OK(ibv_memcpy_from_dm(back, dm, 0, 16));
	OK(memcmp(back, "from the parent", 16));
	OK(ibv_memcpy_to_dm(dm, 16, "from the child ", 16));
	/* A region of it, for a connection here. */
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	struct ibv_mr *mr = ibv_reg_dm_mr(pd, dm, 0, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED);
	TRUE(mr != NULL);
	memcpy(a.buf, "by RDMA", 8);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { 32, mr->rkey } }, *bad;
	OK(ibv_post_send(a.qp, &wr, &bad));
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	OK(ibv_dereg_mr(mr));
	free_end(&a), free_end(&b);
	ibv_unimport_dm(dm);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

static void send_fd(int socket, int fd, const uint32_t handles[2])
{
	struct iovec iov = { (void *)handles, 8 };
	char control[CMSG_SPACE(sizeof fd)] = { 0 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	EQ(sendmsg(socket, &msg, 0), 8);
}

static int recv_fd(int socket, uint32_t handles[2])
{
	struct iovec iov = { handles, 8 };
	char control[CMSG_SPACE(sizeof(int))];
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	EQ(recvmsg(socket, &msg, 0), 8);
	int fd;
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof fd);
	return fd;
}

int main(void)
{
	/* Before the device is opened: a process of its own. */
	int pair[2];
	OK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
	pid_t pid = fork();
	TRUE(pid >= 0);
	if (pid == 0) {
		uint32_t handles[2];
		int fd = recv_fd(pair[1], handles);
		child(fd, handles[0], handles[1]);
		exit(0);
	}
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_alloc_dm_attr attr = { .length = 64 };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &attr);
	OK(ibv_memcpy_to_dm(dm, 0, "from the parent", 16));
	send_fd(pair[0], ctx->cmd_fd, (uint32_t[]){ pd->handle, dm->handle });
	int status;
	EQ(waitpid(pid, &status, 0), pid);
	EQ(status, 0);
	char back[48];
	OK(ibv_memcpy_from_dm(back, dm, 0, 48));
	OK(memcmp(back + 16, "from the child ", 16));
	OK(memcmp(back + 32, "by RDMA", 8));
	OK(ibv_free_dm(dm));
	OK(ibv_dealloc_pd(pd));
	in_one_process(ctx);
	OK(ibv_close_device(ctx));
	return 0;
}
