/* A program whose memory is limited before it looks for a device (ulimit -v): the device works, or it is refused with ENOMEM. Each
   says one line at most. */
#include "check.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORKS, REFUSED, ENDS };

static void limit(size_t left)
{
	unsigned long pages;
	FILE *statm = fopen("/proc/self/statm", "r");
	TRUE(statm != NULL);
	EQ(fscanf(statm, "%lu", &pages), 1);
	fclose(statm);
	struct rlimit as = { pages * 4096 + left, pages * 4096 + left };
	OK(setrlimit(RLIMIT_AS, &as));
}

static int use_it(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = list && list[0] ? ibv_open_device(list[0]) : NULL;
	if (ctx == NULL)
		return errno == ENOMEM ? REFUSED : ENDS;
	/* What this program needs itself is little. */
	static char buf[4096];
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	TRUE(pd && cq);
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	TRUE(mr && qp);
	to_init(qp), to_rtr(qp, qp->qp_num), to_rts(qp);
	struct ibv_sge sge = { (uintptr_t)buf, 8, mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)buf + 64, mr->rkey } };
	OK(ibv_post_send(qp, &wr, &bad));
	struct ibv_wc wc;
	while (ibv_poll_cq(cq, 1, &wc) == 0)
		;
	EQ(wc.status, IBV_WC_SUCCESS);
	OK(ibv_destroy_qp(qp));
	return WORKS;
}

int main(void)
{
	int counts[2] = { 0 };
	for (size_t left = 0; left < 48 << 20; left += left < 2 << 20 ? 32 << 10 : 512 << 10) {
		int out[2], status, lines = 0;
		char said[4096];
		OK(pipe(out));
		pid_t child = fork();
		if (child == 0) {
			dup2(out[1], 2);
			alarm(20);
			limit(left);
			_exit(use_it());
		}
		close(out[1]);
		ssize_t n, len = 0;
		while ((n = read(out[0], said + len, sizeof said - 1 - len)) > 0)
			len += n;
		said[len] = 0;
		close(out[0]);
		for (char *c = said; *c; c++)
			lines += *c == '\n';
		EQ(waitpid(child, &status, 0), child);
		int how = WIFEXITED(status) ? WEXITSTATUS(status) : ENDS;
		/* With more memory it does not get worse. */
		if (how >= ENDS || lines > 1 || (how == REFUSED && counts[WORKS] > 0)) {
			fprintf(stderr, "with %zu KiB left: status %#x, said:\n%s", left >> 10, status, said);
			return 1;
		}
		counts[how]++;
	}
	printf("works %d times, refused %d times\n", counts[WORKS], counts[REFUSED]);
	TRUE(counts[WORKS] > 0 && counts[REFUSED] > 0);
	return 0;
}
