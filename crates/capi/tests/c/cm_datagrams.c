/* Datagram ids: the lookup of a peer's queue pair, its answers, and a datagram. */
#include "cm.h"

static void found(const char *ip)
{
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *server = listener(c, ip, RDMA_PS_UDP, NULL), *id = new_id(c, NULL, RDMA_PS_UDP);
	resolve(id, ip, port_of(server));
	create_qp(id, IBV_QPT_UD);
	char data[181];
	memset(data, 5, sizeof data);
	struct rdma_conn_param p = { .private_data = data, .private_data_len = 181 };
	MINUS_ONE(rdma_connect(id, &p), EINVAL);
	p.private_data_len = 180;
	OK(rdma_connect(id, &p));
	struct rdma_cm_event *e = expect(c, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *other = e->id;
	TRUE(e->listen_id == server && other->qp_type == IBV_QPT_UD && other->ps == RDMA_PS_UDP && other->verbs == id->verbs);
	EQ(e->param.ud.private_data_len, 180);
	EQ(memcmp(e->param.ud.private_data, data, 180), 0);
	OK(rdma_ack_cm_event(e));
	create_qp(other, IBV_QPT_UD);

	char in[40 + 16], out[16] = "a datagram";
	struct ibv_mr *recv = rdma_reg_msgs(other, in, sizeof in), *send = rdma_reg_msgs(id, out, sizeof out);
	OK(rdma_post_recv(other, NULL, in, sizeof in, recv));
	p.private_data_len = 137;
	MINUS_ONE(rdma_accept(other, &p), EINVAL);
	p.private_data_len = 4;
	OK(rdma_accept(other, &p));
	e = expect(c, id, RDMA_CM_EVENT_ESTABLISHED);
	EQ(e->status, 0);
	EQ(e->param.ud.private_data_len, 136);
	EQ(memcmp(e->param.ud.private_data, "\5\5\5\5\0\0", 6), 0);
	EQ(e->param.ud.qp_num, other->qp->qp_num);
	EQ(e->param.ud.qkey, RDMA_UDP_QKEY);
	EQ(e->param.ud.ah_attr.is_global, 1);
	EQ(e->param.ud.ah_attr.port_num, 1);
	struct ibv_ah *ah = ibv_create_ah(id->pd, &e->param.ud.ah_attr);
	TRUE(ah != NULL);
	uint32_t qpn = e->param.ud.qp_num;
	OK(rdma_ack_cm_event(e));
	struct ibv_wc wc;
	OK(rdma_post_ud_send(id, NULL, out, sizeof out, send, 0, ah, qpn));
	EQ(rdma_get_send_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(rdma_get_recv_comp(other, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.byte_len, sizeof in);
	EQ(wc.src_qp, id->qp->qp_num);
	EQ(strcmp(in + 40, out), 0);
	OK(ibv_destroy_ah(ah));
	OK(rdma_dereg_mr(send));
	OK(rdma_dereg_mr(recv));
	destroy_end(id);
	destroy_end(other);
	OK(rdma_destroy_id(server));
	rdma_destroy_event_channel(c);
}

static void refused(void)
{
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *server = listener(c, "127.0.0.1", RDMA_PS_UDP, NULL), *id = new_id(c, NULL, RDMA_PS_UDP);
	resolve(id, "127.0.0.1", port_of(server));
	OK(rdma_connect(id, &(struct rdma_conn_param){ 0 }));
	struct rdma_cm_event *e = expect(c, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *other = e->id;
	OK(rdma_ack_cm_event(e));
	OK(rdma_reject(other, "no", 2));
	e = expect(c, id, RDMA_CM_EVENT_UNREACHABLE);
	/* The status of the SIDR_REP. */
	EQ(e->status, 2);
	EQ(memcmp(e->param.ud.private_data, "no", 2), 0);
	OK(rdma_ack_cm_event(e));
	OK(rdma_destroy_id(other));
	OK(rdma_destroy_id(id));
	OK(rdma_destroy_id(server));
	rdma_destroy_event_channel(c);
}

/* Groups: joined, heard, left; and joined to send only. */
static void groups(void)
{
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_UDP), *deaf = new_id(c, NULL, RDMA_PS_UDP);
	struct sockaddr_storage at = address("127.0.0.1", 0), group = address("239.77.1.2", 0), none = address("10.0.0.1", 0);
	int context;
	MINUS_ONE(rdma_join_multicast(id, sa(&group), &context), EINVAL);
	OK(rdma_bind_addr(id, sa(&at)));
	OK(rdma_bind_addr(deaf, sa(&at)));
	create_qp(id, IBV_QPT_UD);
	create_qp(deaf, IBV_QPT_UD);
	MINUS_ONE(rdma_join_multicast(id, sa(&none), &context), EINVAL);
	MINUS_ONE(rdma_leave_multicast(id, sa(&group)), EADDRNOTAVAIL);
	OK(rdma_join_multicast(id, sa(&group), &context));
	struct rdma_cm_event *e = expect(c, id, RDMA_CM_EVENT_MULTICAST_JOIN);
	EQ(e->status, 0);
	TRUE(e->param.ud.private_data == &context && e->param.ud.private_data_len == 0);
	EQ(e->param.ud.qp_num, 0xffffff);
	EQ(e->param.ud.qkey, RDMA_UDP_QKEY);
	struct ibv_ah *ah = ibv_create_ah(id->pd, &e->param.ud.ah_attr);
	TRUE(ah != NULL);
	OK(rdma_ack_cm_event(e));

	struct rdma_cm_join_mc_attr_ex send_only = {
		.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
		.join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER,
		.addr = sa(&group),
	};
	OK(rdma_join_multicast_ex(deaf, &send_only, NULL));
	expect_ok(c, deaf, RDMA_CM_EVENT_MULTICAST_JOIN);

	char in[2][40 + 16], out[16] = "to all";
	struct ibv_mr *recv = rdma_reg_msgs(id, in, sizeof in), *send = rdma_reg_msgs(deaf, out, sizeof out);
	struct ibv_wc wc;
	OK(rdma_post_recv(id, NULL, in[0], sizeof in[0], recv));
	OK(rdma_post_recv(deaf, NULL, in[1], sizeof in[1], recv));
	OK(rdma_post_ud_send(deaf, NULL, out, sizeof out, send, 0, ah, 0xffffff));
	EQ(rdma_get_send_comp(deaf, &wc), 1);
	EQ(rdma_get_recv_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(strcmp(in[0] + 40, out), 0);
	EQ(ibv_poll_cq(deaf->recv_cq, 1, &wc), 0);
	OK(rdma_leave_multicast(id, sa(&group)));
	MINUS_ONE(rdma_leave_multicast(id, sa(&group)), EADDRNOTAVAIL);
	OK(ibv_destroy_ah(ah));
	OK(rdma_dereg_mr(send));
	OK(rdma_dereg_mr(recv));
	destroy_end(id);
	destroy_end(deaf);

	/* In synchronous mode a join is waited for. */
	id = new_id(NULL, NULL, RDMA_PS_UDP);
	OK(rdma_bind_addr(id, sa(&at)));
	OK(rdma_join_multicast(id, sa(&group), &context));
	EQ(id->event->event, RDMA_CM_EVENT_MULTICAST_JOIN);
	OK(rdma_destroy_id(id));
	rdma_destroy_event_channel(c);
}

int main(void)
{
	groups();
	found("127.0.0.1");
	found("::1");
	refused();
	return 0;
}
