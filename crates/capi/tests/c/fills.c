/* Makes queue pairs on each device until it refuses, and prints their numbers. */
#include "check.h"

int main(void)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	TRUE(list != NULL);
	for (int i = 0; i < n; i++) {
		struct ibv_context *ctx = ibv_open_device(list[i]);
		TRUE(ctx != NULL);
		struct ibv_pd *pd = ibv_alloc_pd(ctx);
		struct ibv_cq *cq = ibv_create_cq(ctx, 1, NULL, NULL, 0);
		TRUE(pd && cq);
		struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
						 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
		int made = 0;
		while (made < 20 && ibv_create_qp(pd, &init))
			made++;
		EQ(errno, ENOMEM);
		IS_NULL(ibv_create_qp(pd, &init), ENOMEM);
		printf("%s made %d\n", ibv_get_device_name(list[i]), made);
		fflush(stdout);
	}
	return 0;
}
