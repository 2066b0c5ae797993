/* Extended reliable connections: an initiator's id, a target's, and an SRQ in the shared domain. */
#include "cm.h"

#include <pthread.h>

static char in[32];

static struct rdma_addrinfo *find(const char *service, int flags, int qp_type)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP, .ai_qp_type = qp_type }, *found = NULL;
	OK(rdma_getaddrinfo("127.0.0.1", service, &hints, &found));
	EQ(found->ai_qp_type, qp_type);
	return found;
}

static void *serve(void *arg)
{
	struct rdma_cm_id *listen = arg, *id;
	struct ibv_wc wc;
	uint32_t srqn;
	OK(rdma_get_request(listen, &id));
	EQ(id->qp_type, IBV_QPT_XRC_RECV);
	TRUE(id->qp && id->qp->qp_type == IBV_QPT_XRC_RECV && !id->send_cq && !id->recv_cq);

	/* Of this id's kind, in the domain of the process, with a queue for its completions. */
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 2, .max_sge = 1 } };
	OK(rdma_create_srq(id, NULL, &srq));
	TRUE(id->srq && id->recv_cq && id->recv_cq_channel && !id->send_cq);
	MINUS_ONE(rdma_create_srq(id, NULL, &srq), EINVAL);
	OK(ibv_get_srq_num(id->srq, &srqn));
	struct ibv_mr *mr = rdma_reg_msgs(id, in, sizeof in);
	OK(rdma_post_recv(id, NULL, in, sizeof in, mr));
	struct rdma_conn_param p = { .private_data = &srqn, .private_data_len = sizeof srqn };
	OK(rdma_accept(id, &p));
	EQ(id->event->event, RDMA_CM_EVENT_ESTABLISHED);
	EQ(id->qp->state, IBV_QPS_RTS);
	EQ(rdma_get_recv_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(strcmp(in, "extended"), 0);
	OK(rdma_disconnect(id));
	OK(rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	return NULL;
}

int main(void)
{
	struct rdma_cm_id *listen, *id;
	struct ibv_qp_init_attr qp = small_qp(0);
	pthread_t thread;
	char service[8], out[32] = "extended";
	struct rdma_addrinfo *res = find(NULL, RAI_PASSIVE, IBV_QPT_XRC_RECV);
	OK(rdma_create_ep(&listen, res, NULL, &qp));
	rdma_freeaddrinfo(res);
	OK(rdma_listen(listen, 0));
	OK(pthread_create(&thread, NULL, serve, listen));

	snprintf(service, sizeof service, "%u", port_of(listen));
	res = find(service, 0, IBV_QPT_XRC_SEND);
	qp = small_qp(0);
	OK(rdma_create_ep(&id, res, NULL, &qp));
	rdma_freeaddrinfo(res);
	EQ(id->qp_type, IBV_QPT_XRC_SEND);
	TRUE(id->qp && id->send_cq && !id->recv_cq && !id->recv_cq_channel);
	OK(rdma_connect(id, NULL));
	uint32_t srqn;
	memcpy(&srqn, id->event->param.conn.private_data, sizeof srqn);
	struct ibv_sge sge = { .addr = (uintptr_t)out, .length = sizeof out };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_mr *mr = rdma_reg_msgs(id, out, sizeof out);
	struct ibv_wc wc;
	sge.lkey = mr->lkey;
	wr.qp_type.xrc.remote_srqn = srqn;
	OK(ibv_post_send(id->qp, &wr, &bad));
	EQ(rdma_get_send_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	OK(rdma_disconnect(id));
	OK(rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	OK(pthread_join(thread, NULL));
	rdma_destroy_ep(listen);
	return 0;
}
