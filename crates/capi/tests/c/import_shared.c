/* A context, its protection domain, regions and device memory in another process than their own: the descriptor is passed, the
 * handles are told. main() imports; the owner, a child, does one thing at a time for it. */
#include "check.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 65536 };
enum kind { PRIVATE, SHARED, LOCAL, DEVICE, KINDS };

/* Of a region of the owner: what is told. */
struct told {
	uint32_t handle, lkey, rkey;
	uint64_t addr;
};

struct hello {
	uint32_t pd, dm, qpn;
	struct told mr[KINDS];
};

enum what { FILL, LOOK, REREG, DEREG, CONNECT, WRITE_BY, DEALLOC };

struct order {
	enum what what;
	uint32_t kind, n;
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

static const int RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/* The process whose memory it is. */
static void owner(int socket)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_alloc_dm_attr attr = { .length = SIZE };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &attr);
	char *memory[KINDS];
	struct ibv_mr *mr[KINDS];
	memory[PRIVATE] = calloc(1, SIZE), memory[LOCAL] = calloc(1, SIZE);
	int fd = memfd_create("shared", 0);
	OK(ftruncate(fd, SIZE));
	memory[SHARED] = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	memory[DEVICE] = NULL;
	mr[PRIVATE] = ibv_reg_mr(pd, memory[PRIVATE], SIZE, RIGHTS);
	mr[SHARED] = ibv_reg_mr(pd, memory[SHARED], SIZE, RIGHTS);
	mr[LOCAL] = ibv_reg_mr(pd, memory[LOCAL], SIZE, IBV_ACCESS_LOCAL_WRITE);
	mr[DEVICE] = ibv_reg_dm_mr(pd, dm, 0, SIZE, RIGHTS | IBV_ACCESS_ZERO_BASED);
	struct end end = make_end(pd, IBV_QPT_RC);
	struct hello hello = { .pd = pd->handle, .dm = dm->handle, .qpn = end.qp->qp_num };
	for (int i = 0; i < KINDS; i++) {
		TRUE(mr[i] != NULL);
		hello.mr[i] = (struct told){ mr[i]->handle, mr[i]->lkey, mr[i]->rkey, (uintptr_t)memory[i] };
	}
	send_fd(socket, ctx->cmd_fd, &hello);
	struct order o;
	while (read(socket, &o, sizeof o) == sizeof o) {
		int64_t answer = 0;
		switch (o.what) {
		case FILL:
			if (o.kind == DEVICE) {
				char bytes[SIZE];
				memset(bytes, (int)o.n, SIZE);
				OK(ibv_memcpy_to_dm(dm, 0, bytes, SIZE));
			} else
				memset(memory[o.kind], (int)o.n, SIZE);
			break;
		case LOOK:
			if (o.kind == DEVICE) {
				char bytes[SIZE];
				OK(ibv_memcpy_from_dm(bytes, dm, 0, SIZE));
				memcpy(&answer, bytes + o.n, 8);
			} else
				memcpy(&answer, memory[o.kind] + o.n, 8);
			break;
		case REREG:
			/* The old memory stays, and is not looked at any more. */
			memory[o.kind] = calloc(1, SIZE);
			OK(ibv_rereg_mr(mr[o.kind], IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory[o.kind], SIZE, 0));
			EQ(mr[o.kind]->lkey, hello.mr[o.kind].lkey);
			hello.mr[o.kind].addr = (uintptr_t)memory[o.kind];
			answer = (int64_t)hello.mr[o.kind].addr;
			break;
		case DEREG:
			answer = ibv_dereg_mr(mr[o.kind]);
			break;
		case CONNECT:
			to_init(end.qp), to_rtr(end.qp, o.n), to_rts(end.qp);
			break;
		case WRITE_BY: {
			/* To its own region, by the importer's queue pair. */
			memset(end.buf, (int)o.n, 4000);
			struct ibv_sge sge = { (uintptr_t)end.buf, 4000, end.mr->lkey };
			struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				.send_flags = IBV_SEND_SIGNALED,
				.wr.rdma = { hello.mr[o.kind].addr, hello.mr[o.kind].rkey } }, *bad;
			OK(ibv_post_send(end.qp, &wr, &bad));
			answer = poll_one(end.cq).status;
			break;
		}
		case DEALLOC: {
			struct ibv_pd *other = ibv_alloc_pd(ctx);
			answer = other->handle;
			OK(ibv_dealloc_pd(other));
			break;
		}
		}
		EQ(write(socket, &answer, sizeof answer), sizeof answer);
	}
	exit(0);
}

static pid_t begin(int *socket)
{
	int pair[2];
	OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	pid_t pid = fork();
	TRUE(pid >= 0);
	if (pid == 0) {
		close(pair[0]);
		owner(pair[1]);
	}
	close(pair[1]);
	*socket = pair[0];
	return pid;
}

static int64_t ask(int socket, enum what what, uint32_t kind, uint32_t n)
{
	struct order o = { what, kind, n };
	int64_t answer;
	EQ(write(socket, &o, sizeof o), sizeof o);
	EQ(read(socket, &answer, sizeof answer), sizeof answer);
	return answer;
}

static enum ibv_wc_status post(struct end *e, struct ibv_send_wr wr, struct ibv_sge sge)
{
	struct ibv_send_wr *bad;
	wr.sg_list = &sge, wr.num_sge = 1, wr.send_flags = IBV_SEND_SIGNALED;
	OK(ibv_post_send(e->qp, &wr, &bad));
	return poll_one(e->cq).status;
}

static const int64_t ALL = 0x0101010101010101;

/* Two queue pairs of the protection domain, here. */
struct pair {
	struct end a, b;
};

static struct pair make_pair(struct ibv_pd *pd)
{
	struct pair p = { make_end(pd, IBV_QPT_RC), make_end(pd, IBV_QPT_RC) };
	connect_ends(&p.a, &p.b);
	return p;
}

static void free_pair(struct pair *p)
{
	free_end(&p->a), free_end(&p->b);
}

static void use(struct ibv_pd *pd, int socket, const struct told *mr, enum kind kind)
{
	struct pair p = make_pair(pd);
	struct ibv_sge theirs = { mr->addr, 20000, mr->lkey }, ours = { (uintptr_t)p.a.buf, 20000, p.a.mr->lkey };
	uint64_t here = (uintptr_t)p.b.buf;
	/* Again and again: what is worth it is done another way later. */
	for (int i = 1; i < 8; i++) {
		/* From its memory, and to it. */
		OK(ask(socket, FILL, kind, (uint32_t)i));
		struct ibv_send_wr write = { .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { here, p.b.mr->rkey } };
		OK(post(&p.a, write, theirs));
		TRUE(p.b.buf[0] == i && p.b.buf[19999] == i && p.b.buf[20000] == 0);
		memset(p.b.buf, 16 + i, 20000);
		struct ibv_send_wr read = { .opcode = IBV_WR_RDMA_READ, .wr.rdma = { here, p.b.mr->rkey } };
		OK(post(&p.a, read, theirs));
		EQ(ask(socket, LOOK, kind, 19992), ALL * (16 + i));
		EQ(ask(socket, LOOK, kind, 20000), ALL * i);
		/* A message from it, and one to it. */
		post_recv(&p.b, 1, 20000);
		struct ibv_send_wr send = { .opcode = IBV_WR_SEND };
		OK(post(&p.a, send, theirs));
		EQ(poll_one(p.b.cq).status, IBV_WC_SUCCESS);
		struct ibv_recv_wr recv = { .sg_list = &theirs, .num_sge = 1 }, *bad;
		OK(ibv_post_recv(p.b.qp, &recv, &bad));
		memset(p.a.buf, 32 + i, 20000);
		OK(post(&p.a, send, ours));
		EQ(poll_one(p.b.cq).status, IBV_WC_SUCCESS);
		EQ(ask(socket, LOOK, kind, 19992), ALL * (32 + i));
		memset(p.b.buf, 0, BUF);
		if (kind == LOCAL)
			continue;
		/* Peers name it by its rkey at a queue pair of this process. */
		struct ibv_send_wr to = { .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { mr->addr + 8000, mr->rkey } };
		memset(p.a.buf, 48 + i, 20000);
		OK(post(&p.a, to, ours));
		EQ(ask(socket, LOOK, kind, 27992), ALL * (48 + i));
		EQ(ask(socket, LOOK, kind, 28000), ALL * i);
		struct ibv_send_wr from = { .opcode = IBV_WR_RDMA_READ, .wr.rdma = { mr->addr + 8000, mr->rkey } };
		memset(p.a.buf, 0, 20000);
		OK(post(&p.a, from, ours));
		EQ(p.a.buf[19999], 48 + i);
	}
	struct ibv_sge eight = { ours.addr, 8, ours.lkey };
	if (kind == SHARED || kind == DEVICE) {
		OK(ask(socket, FILL, kind, 0));
		struct ibv_send_wr add = { .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .wr.atomic = { mr->addr + 64, 5, 0, mr->rkey } };
		OK(post(&p.a, add, eight));
		OK(post(&p.a, add, eight));
		EQ(ask(socket, LOOK, kind, 64), 10);
		EQ(p.a.buf[0], 5);
	} else if (kind == PRIVATE) {
		/* The kernel's copy knows no atomics. */
		struct ibv_send_wr add = { .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .wr.atomic = { mr->addr, 5, 0, mr->rkey } };
		EQ(post(&p.a, add, eight), IBV_WC_REM_ACCESS_ERR);
	} else {
		struct ibv_send_wr to = { .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { mr->addr, mr->rkey } };
		EQ(post(&p.a, to, eight), IBV_WC_REM_ACCESS_ERR);
	}
	free_pair(&p);
	/* Not beyond its end. */
	p = make_pair(pd);
	struct ibv_sge beyond = { mr->addr + SIZE - 8, 16, mr->lkey };
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND };
	EQ(post(&p.a, send, beyond), IBV_WC_LOC_PROT_ERR);
	free_pair(&p);
}

/* Its memory is gone: by either key there is nothing. */
static void gone(struct ibv_pd *pd, const struct told *mr)
{
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND };
	struct pair p = make_pair(pd);
	EQ(post(&p.a, send, (struct ibv_sge){ mr->addr, 100, mr->lkey }), IBV_WC_LOC_PROT_ERR);
	free_pair(&p);
	p = make_pair(pd);
	struct ibv_send_wr to = { .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { mr->addr, mr->rkey } };
	EQ(post(&p.a, to, (struct ibv_sge){ (uintptr_t)p.a.buf, 100, p.a.mr->lkey }), IBV_WC_REM_ACCESS_ERR);
	free_pair(&p);
}

static void imported(int signal)
{
	int socket;
	struct hello hello;
	pid_t pid = begin(&socket);
	int fd = recv_fd(socket, &hello);
	struct ibv_context *ctx = ibv_import_device(fd);
	TRUE(ctx != NULL);
	struct ibv_pd *pd = ibv_import_pd(ctx, hello.pd);
	TRUE(pd && pd->handle == hello.pd && pd->context == ctx);
	struct ibv_mr *mr[KINDS];
	for (int i = 0; i < KINDS; i++) {
		mr[i] = ibv_import_mr(pd, hello.mr[i].handle);
		TRUE(mr[i] != NULL);
		TRUE(mr[i]->addr == NULL && mr[i]->length == SIZE && mr[i]->pd == pd);
		EQ(mr[i]->lkey, hello.mr[i].lkey);
		EQ(mr[i]->rkey, hello.mr[i].rkey);
		use(pd, socket, &hello.mr[i], (enum kind)i);
	}
	/* Peers, and its own process, reach it at a queue pair here. */
	struct end end = make_end(pd, IBV_QPT_RC);
	to_init(end.qp), to_rtr(end.qp, hello.qpn), to_rts(end.qp);
	OK(ask(socket, CONNECT, 0, end.qp->qp_num));
	for (uint32_t i = 1; i < 8; i++)
		for (uint32_t kind = 0; kind < KINDS; kind += kind == SHARED ? 2 : 1) {
			EQ(ask(socket, WRITE_BY, kind, i), IBV_WC_SUCCESS);
			EQ(ask(socket, LOOK, kind, 3992), ALL * i);
		}
	/* It is the same for who imports it once more, and ends with the last; its own process alone destroys it. */
	struct ibv_mr *more = ibv_import_mr(pd, hello.mr[PRIVATE].handle);
	TRUE(more && more->rkey == mr[PRIVATE]->rkey);
	ibv_unimport_mr(mr[PRIVATE]);
	EQ(ask(socket, WRITE_BY, PRIVATE, 9), IBV_WC_SUCCESS);
	REFUSES(ibv_dereg_mr(more), EOPNOTSUPP);
	REFUSES(ibv_dealloc_pd(pd), EOPNOTSUPP);
	EQ(ibv_rereg_mr(more, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE), IBV_REREG_MR_ERR_INPUT);
	ibv_unimport_mr(more);
	gone(pd, &hello.mr[PRIVATE]);
	mr[PRIVATE] = ibv_import_mr(pd, hello.mr[PRIVATE].handle);
	TRUE(mr[PRIVATE] != NULL);
	/* Changed by its process it is another, whether or not the old import has ended. */
	more = mr[PRIVATE];
	hello.mr[PRIVATE].addr = (uint64_t)ask(socket, REREG, PRIVATE, 0);
	gone(pd, &hello.mr[PRIVATE]);
	mr[PRIVATE] = ibv_import_mr(pd, hello.mr[PRIVATE].handle);
	TRUE(mr[PRIVATE] && mr[PRIVATE] != more && mr[PRIVATE]->rkey == more->rkey);
	use(pd, socket, &hello.mr[PRIVATE], PRIVATE);
	ibv_unimport_mr(more);
	use(pd, socket, &hello.mr[PRIVATE], PRIVATE);
	/* Handles of nothing, of nothing any more, and of a region of another protection domain. */
	IS_NULL(ibv_import_pd(ctx, hello.pd ^ 1), ENOENT);
	IS_NULL(ibv_import_pd(ctx, (uint32_t)ask(socket, DEALLOC, 0, 0)), ENOENT);
	IS_NULL(ibv_import_mr(pd, hello.mr[LOCAL].handle ^ 1), ENOENT);
	IS_NULL(ibv_import_mr(pd, 0), ENOENT);
	IS_NULL(ibv_import_mr(pd, 0xffffffff), ENOENT);
	struct ibv_pd *other = ibv_alloc_pd(ctx);
	IS_NULL(ibv_import_mr(other, hello.mr[LOCAL].handle ^ 1), ENOENT);
	OK(ibv_dealloc_pd(other));
	/* Deregistered by its process. */
	OK(ask(socket, DEREG, PRIVATE, 0));
	OK(ask(socket, DEREG, SHARED, 0));
	gone(pd, &hello.mr[PRIVATE]), gone(pd, &hello.mr[SHARED]);
	IS_NULL(ibv_import_mr(pd, hello.mr[SHARED].handle), ENOENT);
	/* Or that has ended. */
	struct ibv_dm *dm = ibv_import_dm(ctx, hello.dm);
	TRUE(dm != NULL);
	OK(kill(pid, signal));
	int status;
	EQ(waitpid(pid, &status, 0), pid);
	gone(pd, &hello.mr[LOCAL]), gone(pd, &hello.mr[DEVICE]);
	char bytes[8];
	OK(ibv_memcpy_from_dm(bytes, dm, 0, 8));
	for (int i = 0; i < KINDS; i++)
		ibv_unimport_mr(mr[i]);
	ibv_unimport_dm(dm);
	OK(ibv_destroy_qp(end.qp));
	OK(ibv_dereg_mr(end.mr));
	OK(ibv_destroy_cq(end.cq));
	ibv_unimport_pd(pd);
	IS_NULL(ibv_import_pd(ctx, hello.pd), EOPNOTSUPP);
	OK(ibv_close_device(ctx));
	close(socket);
}

static void await(pid_t pid)
{
	int status;
	EQ(waitpid(pid, &status, 0), pid);
	EQ(status, 0);
}

/* Another user has the descriptor: that is not enough to reach the memory. */
static void another_user(void)
{
	if (geteuid() != 0)
		return;
	int socket;
	struct hello hello;
	pid_t pid = begin(&socket);
	int fd = recv_fd(socket, &hello);
	pid_t stranger = fork();
	TRUE(stranger >= 0);
	if (stranger == 0) {
		OK(setresgid(65534, 65534, 65534));
		OK(setresuid(65534, 65534, 65534));
		/* Processes of one user share a port. */
		const char *used = getenv("ANYVERBS_UDP_PORT");
		char port[16];
		snprintf(port, sizeof port, "%d", (used ? atoi(used) : 4791) + 15000);
		OK(setenv("ANYVERBS_UDP_PORT", port, 1));
		struct ibv_context *ctx = ibv_import_device(fd);
		TRUE(ctx != NULL);
		IS_NULL(ibv_import_pd(ctx, hello.pd), EOPNOTSUPP);
		exit(0);
	}
	await(stranger);
	close(fd), close(socket);
	await(pid);
}

/* A protection domain that a second process made on the context of the first is not the first one's: a third does not get it. */
static void of_a_second_process(void)
{
	int socket, said[2], done[2];
	struct hello hello;
	pid_t pid = begin(&socket);
	int fd = recv_fd(socket, &hello);
	uint32_t handle;
	OK(pipe(said) | pipe(done));
	pid_t second = fork();
	if (second == 0) {
		close(done[1]);
		struct ibv_pd *pd = ibv_alloc_pd(ibv_import_device(fd));
		TRUE(pd != NULL);
		EQ(write(said[1], &pd->handle, sizeof pd->handle), sizeof pd->handle);
		/* Until the third is done. */
		EQ(read(done[0], &handle, 1), 0);
		exit(0);
	}
	pid_t third = fork();
	if (third == 0) {
		EQ(read(said[0], &handle, sizeof handle), sizeof handle);
		struct ibv_context *ctx = ibv_import_device(fd);
		TRUE(ctx != NULL && ibv_import_pd(ctx, hello.pd) != NULL);
		IS_NULL(ibv_import_pd(ctx, handle), ENOENT);
		exit(0);
	}
	await(third);
	close(done[1]);
	await(second);
	close(fd), close(socket), close(done[0]), close(said[0]), close(said[1]);
	await(pid);
}

/* Who goes by messages alone, the owner or who imports, reaches nobody's memory and lets nobody reach its own. */
static void without_copies(int owner_has_none)
{
	int socket;
	struct hello hello;
	TRUE(getenv("ANYVERBS_DIRECT") == NULL);
	if (owner_has_none)
		OK(setenv("ANYVERBS_DIRECT", "0", 1));
	pid_t pid = begin(&socket);
	OK(unsetenv("ANYVERBS_DIRECT"));
	int fd = recv_fd(socket, &hello);
	pid_t child = fork();
	if (child == 0) {
		if (!owner_has_none)
			OK(setenv("ANYVERBS_DIRECT", "0", 1));
		struct ibv_context *ctx = ibv_import_device(fd);
		TRUE(ctx != NULL);
		IS_NULL(ibv_import_pd(ctx, hello.pd), EOPNOTSUPP);
		exit(0);
	}
	await(child);
	close(fd), close(socket);
	await(pid);
}

int main(void)
{
	another_user();
	of_a_second_process();
	without_copies(0), without_copies(1);
	int socket, status;
	struct hello hello;
	/* Before the device is opened here: processes of their own. */
	pid_t child = fork();
	TRUE(child >= 0);
	if (child == 0) {
		imported(SIGKILL);
		exit(0);
	}
	EQ(waitpid(child, &status, 0), child);
	EQ(status, 0);
	/* Device memory goes on without the process that made it. */
	pid_t pid = begin(&socket);
	int fd = recv_fd(socket, &hello);
	struct ibv_context *ctx = ibv_import_device(fd);
	struct ibv_dm *dm = ibv_import_dm(ctx, hello.dm);
	TRUE(ctx && dm);
	OK(ibv_memcpy_to_dm(dm, 16, "from the other", 16));
	EQ(ask(socket, LOOK, DEVICE, 16), *(const int64_t *)"from the other");
	ibv_unimport_dm(dm);
	OK(ibv_close_device(ctx));
	close(socket);
	EQ(waitpid(pid, &status, 0), pid);
	EQ(status, 0);
	return 0;
}
