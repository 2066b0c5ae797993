/* A context in another process than its own: the descriptor is passed, the handles are told. Device memory is shared; protection
 * domains and regions are not. main() imports; the owner is a child. */
#include "check.h"
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 64 };

/* Handles of what the owner has. */
struct hello {
	uint32_t pd, mr, dm;
};

static void send_fd(int socket, int fd, const struct hello *hello)
{
	struct iovec iov = { (void *)hello, sizeof *hello };
	char control[CMSG_SPACE(sizeof fd)] = { 0 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	EQ(sendmsg(socket, &msg, 0), sizeof *hello);
}

static int recv_fd(int socket, struct hello *hello)
{
	struct iovec iov = { hello, sizeof *hello };
	char control[CMSG_SPACE(sizeof(int))];
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	EQ(recvmsg(socket, &msg, 0), sizeof *hello);
	int fd;
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof fd);
	return fd;
}

/* Tells what its device memory holds whenever it is asked. */
static void owner(int socket)
{
	static char memory[SIZE];
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_alloc_dm_attr attr = { .length = SIZE };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &attr);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	TRUE(pd && dm && mr);
	/* Of its own context: there is none, rather than none here. */
	IS_NULL(ibv_import_pd(ctx, pd->handle ^ 1), ENOENT);
	IS_NULL(ibv_import_mr(pd, mr->handle ^ 1), ENOENT);
	send_fd(socket, ctx->cmd_fd, &(struct hello){ pd->handle, mr->handle, dm->handle });
	char bytes[SIZE];
	while (read(socket, bytes, 1) == 1) {
		OK(ibv_memcpy_from_dm(bytes, dm, 0, SIZE));
		EQ(write(socket, bytes, SIZE), SIZE);
	}
	exit(0);
}

/* Only what the importing process made itself is there, whichever handle is asked for. */
static void others_are_refused(struct ibv_context *ctx, const struct hello *hello)
{
	IS_NULL(ibv_import_pd(ctx, hello->pd), EOPNOTSUPP);
	IS_NULL(ibv_import_pd(ctx, hello->pd ^ 1), EOPNOTSUPP);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd && pd->handle != hello->pd);
	IS_NULL(ibv_import_pd(ctx, hello->pd), EOPNOTSUPP);
	IS_NULL(ibv_import_mr(pd, hello->mr), EOPNOTSUPP);
	IS_NULL(ibv_import_mr(pd, 0), EOPNOTSUPP);
	struct ibv_pd *same = ibv_import_pd(ctx, pd->handle);
	TRUE(same && same != pd);
	ibv_unimport_pd(same);
	OK(ibv_dealloc_pd(pd));
}

int main(void)
{
	int pair[2], status;
	OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	/* Before the device is opened here: processes of their own. */
	pid_t pid = fork();
	TRUE(pid >= 0);
	if (pid == 0) {
		close(pair[0]);
		owner(pair[1]);
	}
	close(pair[1]);
	struct hello hello;
	struct ibv_context *ctx = ibv_import_device(recv_fd(pair[0], &hello));
	TRUE(ctx != NULL);
	others_are_refused(ctx, &hello);
	struct ibv_dm *dm = ibv_import_dm(ctx, hello.dm);
	TRUE(dm != NULL);
	char ours[SIZE] = "from the other", theirs[SIZE];
	OK(ibv_memcpy_to_dm(dm, 0, ours, SIZE));
	EQ(write(pair[0], "", 1), 1);
	EQ(read(pair[0], theirs, SIZE), SIZE);
	OK(memcmp(ours, theirs, SIZE));
	/* Device memory goes on without the process that made it. */
	close(pair[0]);
	EQ(waitpid(pid, &status, 0), pid);
	EQ(status, 0);
	memset(theirs, 0, SIZE);
	OK(ibv_memcpy_from_dm(theirs, dm, 0, SIZE));
	OK(memcmp(ours, theirs, SIZE));
	others_are_refused(ctx, &hello);
	ibv_unimport_dm(dm);
	OK(ibv_close_device(ctx));
	return 0;
}
