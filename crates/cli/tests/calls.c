/* For each line of its input, two functions register memory ten times each. It says how often each of them failed. */
#include <infiniband/verbs.h>
#include <stdio.h>

static char memory[4096];

__attribute__((noinline)) static int setup(struct ibv_pd *pd)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	int failed = mr == NULL || ibv_dereg_mr(mr);
	return failed;
}

__attribute__((noinline)) static int grow(struct ibv_pd *pd)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory + 64, 64, IBV_ACCESS_LOCAL_WRITE);
	int failed = mr == NULL || ibv_dereg_mr(mr);
	return failed;
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct ibv_pd *pd = ctx ? ibv_alloc_pd(ctx) : NULL;
	if (!pd)
		return 1;
	puts("ready");
	fflush(stdout);
	for (char line[64]; fgets(line, sizeof line, stdin);) {
		int failed[2] = { 0, 0 };
		for (int i = 0; i < 10; i++) {
			failed[0] += setup(pd);
			failed[1] += grow(pd);
		}
		printf("%d %d\n", failed[0], failed[1]);
		fflush(stdout);
	}
	return 0;
}
