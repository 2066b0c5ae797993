/* A device with two ports: each has addresses, P_Keys, a state and counters of its own, and they share all objects. */
#include "check.h"
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>

static const int INIT_MASK = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

static union ibv_gid gid_of(struct ibv_context *ctx, uint8_t port)
{
	union ibv_gid gid;
	OK(ibv_query_gid(ctx, port, 0, &gid));
	return gid;
}

/* The last byte of 127.0.0.N. */
static int last_of(const union ibv_gid *gid)
{
	return gid->raw[15];
}

static struct ibv_qp *init_on(struct ibv_pd *pd, struct ibv_cq *cq, uint8_t port)
{
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT,
				    .port_num = port,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	OK(ibv_modify_qp(qp, &attr, INIT_MASK));
	return qp;
}

static int path_on(struct ibv_qp *qp, uint32_t dest, union ibv_gid dgid, uint8_t port)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = dest,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 1,
		.ah_attr = { .is_global = 1, .port_num = port, .grh = { .dgid = dgid, .hop_limit = 1 } },
	};
	return ibv_modify_qp(qp, &attr,
			     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static void ready(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1
	};
	OK(ibv_modify_qp(qp, &attr,
			 IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				 IBV_QP_MAX_QP_RD_ATOMIC));
}

static enum ibv_wc_status end_of(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int n;
	do
		n = ibv_poll_cq(cq, 1, &wc);
	while (n == 0);
	EQ(n, 1);
	return wc.status;
}

static void tables(struct ibv_context *ctx)
{
	struct ibv_device_attr device;
	struct ibv_device_attr_ex device_ex;
	struct ibv_port_attr port;
	union ibv_gid gid;
	__be16 key;
	OK(ibv_query_device(ctx, &device));
	EQ(device.phys_port_cnt, 2);
	EQ(device.max_pkeys, 2);
	OK(ibv_query_device_ex(ctx, NULL, &device_ex));
	EQ(device_ex.phys_port_cnt_ex, 2);
	for (uint8_t n = 1; n <= 2; n++) {
		OK(ibv_query_port(ctx, n, &port));
		EQ(port.state, IBV_PORT_ACTIVE);
		EQ(port.pkey_tbl_len, n);
		gid = gid_of(ctx, n);
		EQ(last_of(&gid), n);
		struct ibv_gid_entry entry;
		OK(ibv_query_gid_ex(ctx, n, 0, &entry, 0));
		EQ(entry.port_num, n);
		EQ(last_of(&entry.gid), n);
	}
	EQ(ibv_get_pkey_index(ctx, 2, htons(0x8001)), 1);
	EQ(ibv_get_pkey_index(ctx, 1, htons(0x8001)), -1);
	struct ibv_gid_entry all[8];
	EQ(ibv_query_gid_table(ctx, all, 8, 0), 2);
	EQ(all[0].port_num, 1);
	EQ(all[1].port_num, 2);
	EQ(all[1].gid_index, 0);
	static const uint8_t none[] = { 0, 3 };
	for (int i = 0; i < 2; i++) {
		REFUSES(ibv_query_port(ctx, none[i], &port), EINVAL);
		MINUS_ONE(ibv_query_gid(ctx, none[i], 0, &gid), EINVAL);
		MINUS_ONE(ibv_query_pkey(ctx, none[i], 0, &key), EINVAL);
	}
}

/* A queue pair of each port, connected to each other: one region serves both. */
static void traffic(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	TRUE(cq != NULL);
	static char buf[64];
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_qp *none = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	for (int port = 0; port <= 3; port += 3) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = port };
		REFUSES(ibv_modify_qp(none, &attr, INIT_MASK), EINVAL);
	}
	/* The second P_Key is one of port 2 alone. */
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .pkey_index = 1 };
	REFUSES(ibv_modify_qp(none, &attr, INIT_MASK), EINVAL);
	attr.port_num = 2;
	OK(ibv_modify_qp(none, &attr, INIT_MASK));
	OK(ibv_destroy_qp(none));

	struct ibv_qp *a = init_on(pd, cq, 1), *b = init_on(pd, cq, 2);
	/* A path leaves by the port of the queue pair. */
	REFUSES(path_on(b, a->qp_num, gid_of(ctx, 1), 1), EINVAL);
	OK(path_on(b, a->qp_num, gid_of(ctx, 1), 2));
	OK(path_on(a, b->qp_num, gid_of(ctx, 2), 1));
	ready(a);
	ready(b);
	struct ibv_qp *both[] = { a, b };
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init;
		OK(ibv_query_qp(both[i], &attr, IBV_QP_PORT, &init));
		EQ(attr.port_num, i + 1);
		EQ(attr.ah_attr.port_num, i + 1);
		buf[0] = 'a' + i;
		struct ibv_sge sge = { .addr = (uintptr_t)buf, .length = 1, .lkey = mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge,
					  .num_sge = 1,
					  .opcode = IBV_WR_RDMA_WRITE,
					  .send_flags = IBV_SEND_SIGNALED,
					  .wr.rdma = { .remote_addr = (uintptr_t)buf + 32, .rkey = mr->rkey } },
				   *bad;
		OK(ibv_post_send(both[i], &wr, &bad));
		EQ(end_of(cq), IBV_WC_SUCCESS);
		EQ(buf[32], 'a' + i);
	}
	/* After a reset it may have the other one. */
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(b, &reset, IBV_QP_STATE));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1 };
	OK(ibv_modify_qp(b, &attr, INIT_MASK));
	OK(ibv_destroy_qp(a));
	OK(ibv_destroy_qp(b));
	OK(ibv_dereg_mr(mr));
	OK(ibv_destroy_cq(cq));
}

/* A datagram leaves by the port of its queue pair, and an address handle of the other one fails. */
static void datagrams(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_UD, NULL, 0);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 2, .qkey = 7 };
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	for (uint8_t port = 2; port >= 1; port--) {
		struct ibv_ah_attr to = { .is_global = 1,
					  .port_num = port,
					  .grh = { .dgid = gid_of(ctx, 1), .hop_limit = 1 } };
		struct ibv_ah *ah = ibv_create_ah(pd, &to);
		TRUE(ah != NULL);
		struct ibv_send_wr wr = { .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_SIGNALED,
					  .wr.ud = { .ah = ah, .remote_qpn = qp->qp_num, .remote_qkey = 7 } },
				   *bad;
		OK(ibv_post_send(qp, &wr, &bad));
		EQ(end_of(cq), port == 2 ? IBV_WC_SUCCESS : IBV_WC_LOC_QP_OP_ERR);
		OK(ibv_destroy_ah(ah));
	}
	struct ibv_ah_attr none = { .is_global = 1, .port_num = 3, .grh = { .dgid = gid_of(ctx, 1) } };
	IS_NULL(ibv_create_ah(pd, &none), EINVAL);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
}

/* An id that is bound to an address has its device and port. */
static void addresses(void)
{
	static const struct {
		const char *ip, *device;
		int port;
	} wanted[] = { { "127.0.0.1", "dual0", 1 }, { "127.0.0.2", "dual0", 2 }, { "127.0.0.3", "plain0", 1 } };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	TRUE(channel != NULL);
	for (int i = 0; i < 3; i++) {
		struct rdma_cm_id *id;
		struct sockaddr_in at = { .sin_family = AF_INET };
		OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
		EQ(inet_pton(AF_INET, wanted[i].ip, &at.sin_addr), 1);
		OK(rdma_bind_addr(id, (struct sockaddr *)&at));
		EQ(strcmp(ibv_get_device_name(id->verbs->device), wanted[i].device), 0);
		EQ(id->port_num, wanted[i].port);
		struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
						 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1,
							  .max_recv_sge = 1 } };
		OK(rdma_create_qp(id, NULL, &init));
		struct ibv_qp_attr attr;
		OK(ibv_query_qp(id->qp, &attr, IBV_QP_PORT, &init));
		EQ(attr.port_num, wanted[i].port);
		rdma_destroy_qp(id);
		OK(rdma_destroy_id(id));
	}
	rdma_destroy_event_channel(channel);
}

static struct sockaddr_in at_port(int n)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK + n - 1) };
	return at;
}

/* A datagram socket uses the port that has its address, and one without an address the port towards the peer. */
static void datagram_sockets(void)
{
	int fds[3];
	struct sockaddr_in names[3];
	for (int n = 1; n <= 2; n++) {
		struct sockaddr_in at = at_port(n);
		socklen_t len = sizeof at;
		fds[n] = rsocket(AF_INET, SOCK_DGRAM, 0);
		TRUE(fds[n] >= 0);
		OK(rbind(fds[n], (struct sockaddr *)&at, sizeof at));
		OK(rgetsockname(fds[n], (struct sockaddr *)&names[n], &len));
	}
	/* The first ones go by UDP, until the peers know their queue pairs. */
	for (int i = 0; i < 20; i++)
		for (int n = 1; n <= 2; n++) {
			char buf[8];
			struct sockaddr_in from;
			socklen_t len = sizeof from;
			EQ(rsendto(fds[n], "hello", 5, 0, (struct sockaddr *)&names[3 - n], sizeof names[0]), 5);
			EQ(rrecvfrom(fds[3 - n], buf, sizeof buf, 0, (struct sockaddr *)&from, &len), 5);
			EQ(from.sin_addr.s_addr, names[n].sin_addr.s_addr);
			EQ(from.sin_port, names[n].sin_port);
		}
	/* The third address is of another device. */
	struct sockaddr_in third = at_port(3);
	int fd = rsocket(AF_INET, SOCK_DGRAM, 0);
	TRUE(fd >= 0);
	OK(rbind(fd, (struct sockaddr *)&third, sizeof third));
	MINUS_ONE(rsendto(fd, "x", 1, 0, (struct sockaddr *)&names[1], sizeof names[0]), EADDRNOTAVAIL);
	OK(rclose(fd));
	OK(rclose(fds[1]));
	OK(rclose(fds[2]));
}

/* A flow rule names a port of the device, and one that it does not have is refused. Without the right to raw packets nothing is. */
static void flow_rules(struct ibv_pd *pd)
{
	struct ibv_cq *cq = ibv_create_cq(pd->context, 8, NULL, NULL, 0);
	TRUE(cq != NULL);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	if (qp == NULL && errno == EPERM) {
		OK(ibv_destroy_cq(cq));
		return;
	}
	TRUE(qp != NULL);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 3 };
	REFUSES(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT), EINVAL);
	attr.port_num = 2;
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT));
	OK(ibv_query_qp(qp, &attr, IBV_QP_PORT, &init));
	EQ(attr.port_num, 2);
	for (int port = 0; port <= 3; port++) {
		struct ibv_flow_attr rule = { .type = IBV_FLOW_ATTR_ALL_DEFAULT, .size = sizeof rule, .port = port };
		if (port == 1 || port == 2) {
			struct ibv_flow *flow = ibv_create_flow(qp, &rule);
			TRUE(flow != NULL);
			OK(ibv_destroy_flow(flow));
		} else {
			IS_NULL(ibv_create_flow(qp, &rule), EINVAL);
		}
	}
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
}

int main(void)
{
	int n = -1;
	struct ibv_device **list = ibv_get_device_list(&n);
	TRUE(list != NULL);
	EQ(n, 2);
	struct ibv_context *ctx = ibv_open_device(list[0]), *other = ibv_open_device(list[1]);
	TRUE(ctx != NULL && other != NULL);
	EQ(strcmp(ibv_get_device_name(list[1]), "plain0"), 0);
	TRUE(ibv_get_device_guid(list[0]) != ibv_get_device_guid(list[1]));
	ibv_free_device_list(list);
	tables(ctx);
	struct ibv_port_attr port;
	REFUSES(ibv_query_port(other, 2, &port), EINVAL);
	union ibv_gid gid = gid_of(other, 1);
	EQ(last_of(&gid), 3);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	traffic(ctx, pd);
	datagrams(ctx, pd);
	addresses();
	datagram_sockets();
	flow_rules(pd);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(other));
	OK(ibv_close_device(ctx));
	return 0;
}
