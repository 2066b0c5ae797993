/* Each refused call says its name and why. The arguments are names of exported calls: each is called with zeros, so that an argument
 * that it needs is NULL. Then come calls through a context, and mistakes of other kinds. */
#include "cm.h"

#include <dlfcn.h>
#include <sys/mman.h>

static int log_fd, failures;
static bool again; /* the calls have said it before */

static long end_of_log(void)
{
	return lseek(log_fd, 0, SEEK_END);
}

/* The log has got a line since then, which names the call. */
static void has_said(const char *call, const char *what, long since)
{
	char said[4096] = "", wanted[200];
	ssize_t n = pread(log_fd, said, sizeof said - 1, since);
	snprintf(wanted, sizeof wanted, "refused: %s", call);
	TRUE(n >= 0);
	if (again && n == 0)
		return;
	if (again || !strstr(said, wanted) || !strstr(said, "ERROR") || !strstr(said, "see `anyverbs explain ")) {
		printf("%s: %s: the log has %s%s\n", call, what, n ? "" : "nothing", said);
		failures++;
	}
}

#define SAYS(call, expression)                         \
	do {                                           \
		long since_ = end_of_log();            \
		(void)!(expression);                   \
		has_said(call, #expression, since_);   \
	} while (0)

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static void with_zeros(const char *name)
{
	long (*call)(long, long, long, long, long, long) = (long (*)(long, long, long, long, long, long))dlsym(RTLD_DEFAULT, name);
	if (!call) {
		printf("%s is not there\n", name);
		failures++;
		return;
	}
	SAYS(name, call(0, 0, 0, 0, 0, 0));
}

/* Bits that are not known. */
static void unknown_bits(void)
{
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 8, .comp_mask = 1u << 30 };
	SAYS("ibv_create_cq_ex", ibv_create_cq_ex(ctx, &cq_attr));
	struct ibv_qp_init_attr_ex qp = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd, .cap = { 1, 1, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | 1u << 30 };
	SAYS("ibv_create_qp_ex", ibv_create_qp_ex(ctx, &qp));
	qp.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	qp.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
	SAYS("ibv_create_qp_ex", ibv_create_qp_ex(ctx, &qp));
	struct ibv_srq_init_attr_ex srq = { .comp_mask = 1u << 30, .pd = pd, .attr = { 8, 1, 0 } };
	SAYS("ibv_create_srq_ex", ibv_create_srq_ex(ctx, &srq));
	srq.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD, srq.srq_type = IBV_SRQT_XRC;
	SAYS("ibv_create_srq_ex", ibv_create_srq_ex(ctx, &srq));
	struct ibv_xrcd_init_attr xrcd = { .fd = -1, .comp_mask = IBV_XRCD_INIT_ATTR_FD };
	SAYS("ibv_open_xrcd", ibv_open_xrcd(ctx, &xrcd));
	xrcd.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, xrcd.fd = 12345;
	SAYS("ibv_open_xrcd", ibv_open_xrcd(ctx, &xrcd));
	struct ibv_td_init_attr td = { .comp_mask = 1 };
	SAYS("ibv_alloc_td", ibv_alloc_td(ctx, &td));
	struct ibv_parent_domain_init_attr domain = { .pd = pd, .comp_mask = 1u << 30 };
	SAYS("ibv_alloc_parent_domain", ibv_alloc_parent_domain(ctx, &domain));
	domain.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
	SAYS("ibv_alloc_parent_domain", ibv_alloc_parent_domain(ctx, &domain));
	struct ibv_alloc_dm_attr dm = { .length = 64, .comp_mask = 1 };
	SAYS("ibv_alloc_dm", ibv_alloc_dm(ctx, &dm));
	SAYS("ibv_alloc_mw", ibv_alloc_mw(pd, 9));
	struct ibv_counters_init_attr counters = { .comp_mask = 1 };
	SAYS("ibv_create_counters", ibv_create_counters(ctx, &counters));
	struct ibv_flow_action_esp_attr esp = { .comp_mask = 1u << 30 };
	SAYS("ibv_create_flow_action_esp", ibv_create_flow_action_esp(ctx, &esp));
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM };
	SAYS("ibv_open_qp", ibv_open_qp(ctx, &open));
	struct ibv_gid_entry entry;
	SAYS("ibv_query_gid_ex", ibv_query_gid_ex(ctx, 1, 0, &entry, 1));
	SAYS("ibv_query_gid_table", ibv_query_gid_table(ctx, &entry, 1, 1));
	struct ibv_sge sge = { 0 };
	SAYS("ibv_advise_mr", ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 1u << 20, &sge, 1));
	SAYS("ibv_advise_mr", ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
	struct ibv_mr *mr = ibv_reg_mr(pd, &entry, sizeof entry, 0);
	SAYS("ibv_rereg_mr", ibv_rereg_mr(mr, 1 << 20, pd, NULL, 0, 0));
	OK(ibv_dereg_mr(mr));
	struct ibv_modify_cq_attr modify = { .attr_mask = 1u << 30 };
	SAYS("ibv_modify_cq", ibv_modify_cq(cq, &modify));
}

/* Objects that are of no use for the call, or in use. */
static void objects(void)
{
	SAYS("ibv_dealloc_pd", ibv_dealloc_pd((struct ibv_pd *)&failures));
	SAYS("ibv_req_notify_cq", ibv_req_notify_cq(cq, 0));
	struct ibv_wc wc;
	SAYS("ibv_poll_cq", ibv_poll_cq(cq, -1, &wc));
	struct end rc = make_end(pd, IBV_QPT_RC);
	union ibv_gid group = { .raw = { 0xff, 0x0e, [10] = 0xff, 0xff, 239, 1, 2, 3 } };
	SAYS("ibv_attach_mcast", ibv_attach_mcast(rc.qp, &group, 0));
	struct end ud = make_end(pd, IBV_QPT_UD);
	SAYS("ibv_detach_mcast", ibv_detach_mcast(ud.qp, &group, 0));
	group.raw[0] = 0;
	SAYS("ibv_attach_mcast", ibv_attach_mcast(ud.qp, &group, 0));
	SAYS("ibv_qp_to_qp_ex", ibv_qp_to_qp_ex(rc.qp));
	struct ibv_qp_rate_limit_attr rate = { .comp_mask = 1 };
	SAYS("ibv_modify_qp_rate_limit", ibv_modify_qp_rate_limit(rc.qp, &rate));
	struct ibv_flow_attr flow = { .size = sizeof flow, .port = 1 };
	SAYS("ibv_create_flow", ibv_create_flow(rc.qp, &flow));
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .send_flags = 1 << 20, .bind_info = { .mr = rc.mr, .addr = (uintptr_t)rc.buf, .length = 8 } };
	SAYS("ibv_bind_mw", ibv_bind_mw(rc.qp, mw, &bind));
	OK(ibv_dealloc_mw(mw));
	struct ibv_sge sge = { (uintptr_t)rc.buf, 8, rc.mr->lkey };
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad_send;
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;
	/* They are in RESET. */
	SAYS("ibv_post_send", ibv_post_send(rc.qp, &send, &bad_send));
	SAYS("ibv_post_recv", ibv_post_recv(rc.qp, &receive, &bad));
	SAYS("ibv_post_send", ibv_post_send(ud.qp, &send, &bad_send));
	struct ibv_td *td = ibv_alloc_td(ctx, &(struct ibv_td_init_attr){ 0 });
	struct ibv_parent_domain_init_attr domain = { .pd = pd, .td = td };
	struct ibv_pd *parent = ibv_alloc_parent_domain(ctx, &domain);
	SAYS("ibv_dealloc_td", ibv_dealloc_td(td));
	OK(ibv_dealloc_pd(parent));
	OK(ibv_dealloc_td(td));
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &(struct ibv_alloc_dm_attr){ .length = 64 });
	SAYS("ibv_memcpy_to_dm", ibv_memcpy_to_dm(dm, 64, rc.buf, 4));
	SAYS("ibv_memcpy_from_dm", ibv_memcpy_from_dm((void *)16, dm, 0, 4));
	SAYS("ibv_reg_dm_mr", ibv_reg_dm_mr(pd, dm, 0, 65, IBV_ACCESS_ZERO_BASED));
	OK(ibv_free_dm(dm));
	free_end(&rc), free_end(&ud);
}

static void srqs(void)
{
	struct ibv_srq_init_attr init = { .attr = { 4, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_srq_attr attr = { 0 };
	SAYS("ibv_modify_srq", ibv_modify_srq(srq, &attr, 1 << 20));
	struct ibv_sge sges[64] = { { 0 } };
	struct ibv_recv_wr wr = { .sg_list = sges, .num_sge = 64 }, *bad;
	SAYS("ibv_post_srq_recv", ibv_post_srq_recv(srq, &wr, &bad));
	SAYS("ibv_post_srq_recv", ibv_post_srq_recv(srq, &(struct ibv_recv_wr){ .num_sge = 1 }, &bad));
	struct ibv_ops_wr ops = { .opcode = 99 }, *bad_ops;
	SAYS("ibv_post_srq_ops", ibv_post_srq_ops(srq, &ops, &bad_ops));
	ops.opcode = IBV_WR_TAG_SYNC;
	SAYS("ibv_post_srq_ops", ibv_post_srq_ops(srq, &ops, &bad_ops));
	OK(ibv_destroy_srq(srq));
}

/* Calls that come in a row. */
static void rows(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 8 };
	struct ibv_cq_ex *ex = ibv_create_cq_ex(ctx, &attr);
	struct ibv_poll_cq_attr poll = { .comp_mask = 1 };
	SAYS("ibv_start_poll", ibv_start_poll(ex, &poll));
	SAYS("ibv_next_poll", ibv_next_poll(ex));
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd, .cap = { 4, 4, 1, 1, 8 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	struct ibv_qp_ex *qpx = ibv_qp_to_qp_ex(qp);
	SAYS("ibv_wr_complete", ibv_wr_complete(qpx));
	ibv_wr_start(qpx);
	ibv_wr_set_sge(qpx, 1, 2, 3);
	SAYS("ibv_wr_complete", ibv_wr_complete(qpx));
	ibv_wr_start(qpx);
	qpx->wr_flags = 1 << 20;
	ibv_wr_send(qpx);
	SAYS("ibv_wr_complete", ibv_wr_complete(qpx));
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(ex)));
}

/* Queues of Ethernet frames; a program without the right to them tests nothing of it. */
static void frames(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	if (!qp && errno == EPERM)
		return;
	TRUE(qp);
	struct ibv_sge sges[64] = { { 0 } };
	struct ibv_send_wr send = { .sg_list = sges, .num_sge = 64 }, *bad_send;
	struct ibv_recv_wr receive = { .sg_list = sges, .num_sge = 64 }, *bad;
	SAYS("ibv_post_recv", ibv_post_recv(qp, &receive, &bad));
	TRUE(bad == &receive);
	receive.num_sge = 1;
	SAYS("ibv_post_recv", ibv_post_recv(qp, &receive, &bad));
	send.opcode = IBV_WR_SEND;
	SAYS("ibv_post_send", ibv_post_send(qp, &send, &bad_send));
	send.num_sge = 1, send.opcode = IBV_WR_RDMA_READ;
	SAYS("ibv_post_send", ibv_post_send(qp, &send, &bad_send));
	send.opcode = IBV_WR_SEND, send.send_flags = 1 << 20;
	SAYS("ibv_post_send", ibv_post_send(qp, &send, &bad_send));
	TRUE(bad_send == &send);
	struct ibv_qp_attr attr = { .qp_state = 77 };
	SAYS("ibv_modify_qp", ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	SAYS("ibv_attach_mcast", ibv_attach_mcast(qp, &(union ibv_gid){ .raw = { 0xff } }, 0));
	struct ibv_flow_attr flow = { .size = sizeof flow, .port = 9 };
	SAYS("ibv_create_flow", ibv_create_flow(qp, &flow));
	flow.port = 1, flow.type = 99;
	SAYS("ibv_create_flow", ibv_create_flow(qp, &flow));
	OK(ibv_destroy_qp(qp));

	struct ibv_wq_init_attr wq_init = { .wq_type = 5, .max_wr = 4, .max_sge = 1, .pd = pd, .cq = cq };
	SAYS("ibv_create_wq", ibv_create_wq(ctx, &wq_init));
	wq_init.wq_type = IBV_WQT_RQ;
	struct ibv_wq *wq = ibv_create_wq(ctx, &wq_init);
	TRUE(wq);
	receive.num_sge = 64;
	SAYS("ibv_post_wq_recv", ibv_post_wq_recv(wq, &receive, &bad));
	receive.num_sge = 1;
	SAYS("ibv_post_wq_recv", ibv_post_wq_recv(wq, &receive, &bad));
	struct ibv_wq_attr wq_attr = { .attr_mask = 1 << 20 };
	SAYS("ibv_modify_wq", ibv_modify_wq(wq, &wq_attr));
	struct ibv_rwq_ind_table_init_attr table = { .log_ind_tbl_size = 31, .ind_tbl = &wq };
	SAYS("ibv_create_rwq_ind_table", ibv_create_rwq_ind_table(ctx, &table));
	OK(ibv_destroy_wq(wq));
}

static void identifiers(void)
{
	struct rdma_cm_id *id = NULL;
	SAYS("rdma_create_id", rdma_create_id(NULL, &id, NULL, 7));
	struct rdma_event_channel *c = channel();
	id = new_id(c, NULL, RDMA_PS_TCP);
	struct sockaddr_storage address_ = { .ss_family = AF_UNIX };
	SAYS("rdma_bind_addr", rdma_bind_addr(id, sa(&address_)));
	SAYS("rdma_resolve_addr", rdma_resolve_addr(id, NULL, sa(&address_), 100));
	SAYS("rdma_resolve_route", rdma_resolve_route(id, 100));
	SAYS("rdma_connect", rdma_connect(id, NULL));
	SAYS("rdma_accept", rdma_accept(id, NULL));
	SAYS("rdma_reject", rdma_reject(id, NULL, 0));
	SAYS("rdma_disconnect", rdma_disconnect(id));
	SAYS("rdma_establish", rdma_establish(id));
	SAYS("rdma_notify", rdma_notify(id, IBV_EVENT_CQ_ERR));
	SAYS("rdma_get_request", rdma_get_request(id, &id));
	SAYS("rdma_set_option", rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, NULL, 0));
	struct ibv_qp_attr attr = { .qp_state = 99 };
	int mask;
	SAYS("rdma_init_qp_attr", rdma_init_qp_attr(id, &attr, &mask));
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	SAYS("rdma_create_qp", rdma_create_qp(id, pd, &init));
	struct ibv_srq_init_attr srq = { .attr = { 1, 1, 0 } };
	SAYS("rdma_create_srq", rdma_create_srq(id, pd, &srq));
	address_ = address("239.1.2.3", 0);
	SAYS("rdma_join_multicast", rdma_join_multicast(id, sa(&address_), NULL));
	SAYS("rdma_leave_multicast", rdma_leave_multicast(id, sa(&address_)));
	struct rdma_cm_join_mc_attr_ex join = { .comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS, .addr = sa(&address_) };
	SAYS("rdma_join_multicast_ex", rdma_join_multicast_ex(id, &join, NULL));
	OK(rdma_destroy_id(id));
	rdma_destroy_event_channel(c);
}

int main(int argc, char **argv)
{
	log_fd = memfd_create("log", 0);
	TRUE(log_fd >= 0 && dup2(log_fd, STDERR_FILENO) >= 0);
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	TRUE(pd && cq);
	for (int n = 1; n < argc; n++)
		with_zeros(argv[n]);
	unknown_bits();
	objects();
	srqs();
	rows();
	frames();
	identifiers();
	/* Nothing is said twice. */
	again = true;
	unknown_bits();
	if (failures)
		printf("%d calls did not say why\n", failures);
	return failures != 0;
}
