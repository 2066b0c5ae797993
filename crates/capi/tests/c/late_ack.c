// A queue pair is destroyed while an event of it is not acknowledged for three seconds.
#include "check.h"
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

static void *destroy(void *qp)
{
	OK(ibv_destroy_qp(qp));
	return NULL;
}

int main(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &si);
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, srq, 0);
	to_init(qp);
	to_rtr(qp, qp->qp_num);
	to_err(qp);
	struct ibv_async_event event;
	OK(ibv_get_async_event(context, &event));
	EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
	pthread_t thread;
	OK(pthread_create(&thread, NULL, destroy, qp));
	sleep(3);
	ibv_ack_async_event(&event);
	OK(pthread_join(thread, NULL));
	OK(ibv_destroy_srq(srq));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(context));
	return 0;
}
