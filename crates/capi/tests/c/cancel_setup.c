/* No call that sets up or takes down is a cancellation point: a thread that is cancelled in one would leave its locks held for
   ever. Each call is made by a thread whose cancellation is pending all the while, so that the first cancellation point at which
   it is not disabled ends the thread. The peer is another process, so that the link through shared memory is made, too. */
#include "check.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

struct call {
	void (*body)(void);
	bool finished;
};

static void *make(void *arg)
{
	struct call *call = arg;
	OK(pthread_cancel(pthread_self()));
	call->body();
	call->finished = true;
	for (;;)
		pthread_testcancel();
	return NULL;
}

/* Makes a call by a thread of its own. */
static void cancelled_in(const char *name, void (*body)(void))
{
	struct call call = { body, false };
	pthread_t thread;
	void *result;
	OK(pthread_create(&thread, NULL, make, &call));
	OK(pthread_join(thread, &result));
	TRUE(result == PTHREAD_CANCELED);
	if (!call.finished) {
		fprintf(stderr, "%s was cancelled in the middle\n", name);
		exit(1);
	}
}

#define STEP(name) cancelled_in(#name, name)

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *rc, *ud;
static struct ibv_mr *mr;
static struct ibv_mw *mw;
static struct ibv_dm *dm;
static struct ibv_ah *ah;
static char *buf;
static struct ibv_device **list;
static int file;

struct address {
	uint32_t rc, ud;
	union ibv_gid gid;
	uint64_t at;
	uint32_t rkey;
};
static struct address mine, theirs;

static void get_list(void) { TRUE((list = ibv_get_device_list(NULL)) != NULL); }
static void open_it(void) { TRUE((ctx = ibv_open_device(list[0])) != NULL); }
static void free_list(void) { ibv_free_device_list(list); }
static void query(void)
{
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	OK(ibv_query_device(ctx, &device));
	OK(ibv_query_port(ctx, 1, &port));
	OK(ibv_query_gid(ctx, 1, 0, &mine.gid));
}
static void alloc_pd(void) { TRUE((pd = ibv_alloc_pd(ctx)) != NULL); }
static void reg_mr(void)
{
	mr = ibv_reg_mr(pd, buf, BUF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	TRUE(mr != NULL);
}
static void rereg_mr(void)
{
	OK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE));
}
static void alloc_mw(void) { TRUE((mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2)) != NULL); }
static void alloc_dm(void)
{
	struct ibv_alloc_dm_attr attr = { .length = 4096 };
	TRUE((dm = ibv_alloc_dm(ctx, &attr)) != NULL);
}
static void create_channel(void) { TRUE((channel = ibv_create_comp_channel(ctx)) != NULL); }
static void create_cq(void) { TRUE((cq = ibv_create_cq(ctx, 32, NULL, channel, 0)) != NULL); }
static void req_notify(void) { OK(ibv_req_notify_cq(cq, 0)); }
static void create_srq(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
	TRUE((srq = ibv_create_srq(pd, &attr)) != NULL);
}
static void create_rc(void) { rc = make_qp(pd, cq, IBV_QPT_RC, NULL, 0); }
static void create_ud(void) { ud = make_qp(pd, cq, IBV_QPT_UD, NULL, 0); }
static void init_rc(void) { to_init(rc); }
static void init_ud(void) { to_init(ud); }
static void rtr_ud(void) { to_rtr(ud, 0); }
static void rts_ud(void) { to_rts(ud); }
static void rtr_rc(void)
{
	to_rtr(rc, theirs.rc);
}
static void rts_rc(void) { to_rts(rc); }
static void create_ah(void)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = theirs.gid, .hop_limit = 64 } };
	TRUE((ah = ibv_create_ah(pd, &attr)) != NULL);
}
static void post_ud(void)
{
	struct ibv_sge sge = { (uintptr_t)buf, 8, mr->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED, .wr.ud = { ah, theirs.ud, 0x11111111 } };
	OK(ibv_post_send(ud, &wr, &bad));
}
static void write_rc(void)
{
	struct ibv_sge sge = { (uintptr_t)buf, 8, mr->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { theirs.at, theirs.rkey } };
	OK(ibv_post_send(rc, &wr, &bad));
}
static void read_rc(void)
{
	struct ibv_sge sge = { (uintptr_t)buf, 8, mr->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { theirs.at, theirs.rkey } };
	OK(ibv_post_send(rc, &wr, &bad));
}
static void poll_one_cq(void)
{
	struct ibv_wc wc;
	int n = 0;
	while (n == 0)
		n = ibv_poll_cq(cq, 1, &wc);
	EQ(n, 1);
	EQ(wc.status, IBV_WC_SUCCESS);
}
static void err_rc(void) { to_err(rc); }
static void destroy_ah(void) { OK(ibv_destroy_ah(ah)); }
static void destroy_rc(void) { OK(ibv_destroy_qp(rc)); }
static void destroy_ud(void) { OK(ibv_destroy_qp(ud)); }
static void destroy_srq(void) { OK(ibv_destroy_srq(srq)); }
static void destroy_cq(void) { OK(ibv_destroy_cq(cq)); }
static void destroy_channel(void) { OK(ibv_destroy_comp_channel(channel)); }
static void dereg_mr(void) { OK(ibv_dereg_mr(mr)); }
static void dealloc_mw(void) { OK(ibv_dealloc_mw(mw)); }
static void free_dm(void) { OK(ibv_free_dm(dm)); }
static void dealloc_pd(void) { OK(ibv_dealloc_pd(pd)); }
static void close_it(void) { OK(ibv_close_device(ctx)); }

static struct rdma_event_channel *events;
static struct rdma_cm_id *id;
static void create_events(void) { TRUE((events = rdma_create_event_channel()) != NULL); }
static void create_id(void) { OK(rdma_create_id(events, &id, NULL, RDMA_PS_TCP)); }
static void bind_id(void)
{
	struct sockaddr_storage any = { .ss_family = AF_INET };
	OK(rdma_bind_addr(id, (struct sockaddr *)&any));
}
static void listen_id(void) { OK(rdma_listen(id, 4)); }
static struct rdma_cm_id *active, *passive;
static struct rdma_cm_event *event;
static void next_event(enum rdma_cm_event_type type)
{
	OK(rdma_get_cm_event(events, &event));
	EQ(event->event, type);
}
static void ack_event(void) { OK(rdma_ack_cm_event(event)); }
static void create_active(void) { OK(rdma_create_id(events, &active, NULL, RDMA_PS_TCP)); }
static void resolve_addr(void)
{
	OK(rdma_resolve_addr(active, NULL, rdma_get_local_addr(id), 2000));
}
static void resolve_route(void) { OK(rdma_resolve_route(active, 2000)); }
static void create_cm_qp(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	OK(rdma_create_qp(active, NULL, &attr));
}
static void create_passive_qp(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	OK(rdma_create_qp(passive, NULL, &attr));
}
static struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
static void connect_it(void) { OK(rdma_connect(active, &param)); }
static void accept_it(void) { OK(rdma_accept(passive, &param)); }
static void disconnect_it(void) { OK(rdma_disconnect(active)); }
static void answer_it(void) { OK(rdma_disconnect(passive)); }
static void destroy_cm_qps(void) { rdma_destroy_qp(active), rdma_destroy_qp(passive); }
static void destroy_cm_ids(void) { OK(rdma_destroy_id(active)); OK(rdma_destroy_id(passive)); }
static void destroy_id(void) { OK(rdma_destroy_id(id)); }
static void destroy_events(void) { rdma_destroy_event_channel(events); }

/* Multicast. */
static struct rdma_cm_id *member;
static struct sockaddr_in group;
static void create_member(void) { OK(rdma_create_id(events, &member, NULL, RDMA_PS_UDP)); }
static void bind_member(void)
{
	struct sockaddr_in lo = { .sin_family = AF_INET };
	inet_pton(AF_INET, "127.0.0.1", &lo.sin_addr);
	OK(rdma_bind_addr(member, (struct sockaddr *)&lo));
}
static void create_member_qp(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_UD };
	OK(rdma_create_qp(member, NULL, &attr));
}
static void join(void)
{
	group.sin_family = AF_INET;
	inet_pton(AF_INET, "239.1.2.3", &group.sin_addr);
	OK(rdma_join_multicast(member, (struct sockaddr *)&group, NULL));
}
static void leave(void) { OK(rdma_leave_multicast(member, (struct sockaddr *)&group)); }
static void destroy_member(void) { rdma_destroy_qp(member); OK(rdma_destroy_id(member)); }

/* XRC. */
static struct ibv_xrcd *xrcd;
static struct ibv_srq *xrc_srq;
static struct ibv_qp *target, *initiator;
static void open_xrcd(void)
{
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = file,
		.oflags = O_CREAT };
	TRUE((xrcd = ibv_open_xrcd(ctx, &attr)) != NULL);
}
static void create_xrc_srq(void)
{
	struct ibv_srq_init_attr_ex attr = { .attr = { .max_wr = 8, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = IBV_SRQT_XRC, .xrcd = xrcd, .cq = cq, .pd = pd };
	TRUE((xrc_srq = ibv_create_srq_ex(ctx, &attr)) != NULL);
}
static void create_target(void)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
	TRUE((target = ibv_create_qp_ex(ctx, &attr)) != NULL);
}
static void create_initiator(void)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_XRC_SEND, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
		.send_cq = cq, .cap = { .max_send_wr = 4, .max_send_sge = 1 } };
	TRUE((initiator = ibv_create_qp_ex(ctx, &attr)) != NULL);
}
static void open_target(void)
{
	struct ibv_qp_open_attr attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
		.qp_num = target->qp_num, .xrcd = xrcd, .qp_type = IBV_QPT_XRC_RECV };
	struct ibv_qp *again = ibv_open_qp(ctx, &attr);
	TRUE(again != NULL);
	OK(ibv_destroy_qp(again));
}
static void close_xrc(void)
{
	OK(ibv_destroy_qp(initiator));
	OK(ibv_destroy_qp(target));
	OK(ibv_destroy_srq(xrc_srq));
	OK(ibv_close_xrcd(xrcd));
}

/* Synchronous ids. The client of another thread waits, and so does the thread that gets its request; both are cancelled in that. */
static struct rdma_cm_id *listening, *requested;
static struct rdma_addrinfo *there;
static void get_addrinfo(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP };
	OK(rdma_getaddrinfo("127.0.0.1", "7471", &hints, &there));
}
static void create_ep(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	OK(rdma_create_ep(&listening, there, NULL, &attr));
}
static void listen_ep(void) { OK(rdma_listen(listening, 4)); }
static void get_request(void) { OK(rdma_get_request(listening, &requested)); }
static void resolve_to_ep(void)
{
	OK(rdma_resolve_addr(active, NULL, rdma_get_local_addr(listening), 2000));
}
static void reject_it(void) { OK(rdma_reject(requested, NULL, 0)); }
static void destroy_requested(void) { rdma_destroy_ep(requested); }
static void destroy_ep(void) { rdma_destroy_ep(listening); rdma_freeaddrinfo(there); }
static void destroy_active(void) { rdma_destroy_qp(active); OK(rdma_destroy_id(active)); }

/* A call that waits: the thread is cancelled in it, and another goes on in its place. */
static void cancelled_waiting(void (*body)(void))
{
	struct call call = { body, false };
	pthread_t thread;
	void *result;
	OK(pthread_create(&thread, NULL, make, &call));
	OK(pthread_join(thread, &result));
	TRUE(result == PTHREAD_CANCELED && !call.finished);
}

static void exchange(int in, int out)
{
	mine.rc = rc->qp_num, mine.ud = ud->qp_num, mine.at = (uintptr_t)buf, mine.rkey = mr->rkey;
	EQ(write(out, &mine, sizeof mine), sizeof mine);
	EQ(read(in, &theirs, sizeof theirs), sizeof theirs);
}

static void set_up(int in, int out)
{
	get_list(), open_it(), query(), free_list(), alloc_pd(), reg_mr(), create_channel(), create_cq();
	create_rc(), create_ud(), init_rc(), init_ud(), exchange(in, out), rtr_rc(), rts_rc(), rtr_ud(), rts_ud();
}

/* A process that sets up its side when it gets a byte, and answers what comes. */
static pid_t make_peer(int to_peer[2], int from_peer[2])
{
	OK(pipe(to_peer));
	OK(pipe(from_peer));
	pid_t peer = fork();
	if (peer != 0)
		return peer;
	char done;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	EQ(read(to_peer[0], &done, 1), 1);
	set_up(to_peer[0], from_peer[1]);
	EQ(write(from_peer[1], &done, 1), 1);
	struct ibv_wc wc;
	for (;;)
		ibv_poll_cq(cq, 1, &wc);
}

int main(void)
{
	int to_peer[2][2], from_peer[2][2];
	pid_t peers[2];
	char done = 0;
	buf = calloc(1, BUF);
	for (int i = 0; i < 2; i++)
		peers[i] = make_peer(to_peer[i], from_peer[i]);
	EQ(write(to_peer[0][1], &done, 1), 1);
	STEP(get_list), STEP(open_it), STEP(query), STEP(free_list), STEP(alloc_pd), STEP(reg_mr), STEP(rereg_mr);
	STEP(alloc_mw), STEP(alloc_dm), STEP(create_channel), STEP(create_cq), STEP(req_notify), STEP(create_srq);
	STEP(create_rc), STEP(create_ud), STEP(init_rc), STEP(init_ud);
	exchange(from_peer[0][0], to_peer[0][1]);
	/* The first that needs the link to the peer. */
	STEP(rtr_rc), STEP(rts_rc), STEP(rtr_ud), STEP(rts_ud);
	EQ(read(from_peer[0][0], &done, 1), 1);
	STEP(create_ah), STEP(post_ud), STEP(poll_one_cq);
	for (int i = 0; i < 20; i++) {
		/* Messages first, then copies by the kernel. */
		STEP(write_rc), STEP(poll_one_cq);
		STEP(read_rc), STEP(poll_one_cq);
	}
	STEP(create_events), STEP(create_id), STEP(bind_id), STEP(listen_id);
	STEP(create_active), STEP(resolve_addr), next_event(RDMA_CM_EVENT_ADDR_RESOLVED), STEP(ack_event);
	STEP(resolve_route), next_event(RDMA_CM_EVENT_ROUTE_RESOLVED), STEP(ack_event);
	STEP(create_cm_qp), STEP(connect_it), next_event(RDMA_CM_EVENT_CONNECT_REQUEST);
	passive = event->id;
	STEP(ack_event), STEP(create_passive_qp), STEP(accept_it);
	next_event(RDMA_CM_EVENT_ESTABLISHED), STEP(ack_event), next_event(RDMA_CM_EVENT_ESTABLISHED), STEP(ack_event);
	STEP(create_member), STEP(bind_member), STEP(create_member_qp), STEP(join);
	next_event(RDMA_CM_EVENT_MULTICAST_JOIN), STEP(ack_event), STEP(leave), STEP(destroy_member);
	char path[] = "/tmp/cancel-XXXXXX";
	TRUE((file = mkstemp(path)) >= 0);
	OK(unlink(path));
	STEP(open_xrcd), STEP(create_xrc_srq), STEP(create_target), STEP(create_initiator), STEP(open_target), STEP(close_xrc);
	STEP(disconnect_it), next_event(RDMA_CM_EVENT_DISCONNECTED), STEP(ack_event), STEP(answer_it);
	next_event(RDMA_CM_EVENT_DISCONNECTED), STEP(ack_event);
	STEP(destroy_cm_qps), STEP(destroy_cm_ids);
	STEP(get_addrinfo), STEP(create_ep), STEP(listen_ep);
	cancelled_waiting(get_request);
	STEP(create_active), STEP(resolve_to_ep), next_event(RDMA_CM_EVENT_ADDR_RESOLVED), STEP(ack_event);
	STEP(resolve_route), next_event(RDMA_CM_EVENT_ROUTE_RESOLVED), STEP(ack_event);
	STEP(create_cm_qp), STEP(connect_it);
	/* By this thread, which is not cancelled: the call waits. */
	get_request();
	STEP(reject_it), next_event(RDMA_CM_EVENT_REJECTED), STEP(ack_event);
	STEP(destroy_active), STEP(destroy_requested), STEP(destroy_ep);
	STEP(destroy_id), STEP(destroy_events);
	STEP(err_rc), STEP(destroy_ah), STEP(destroy_rc), STEP(destroy_ud), STEP(destroy_srq), STEP(destroy_cq);
	STEP(destroy_channel), STEP(dereg_mr), STEP(dealloc_mw), STEP(free_dm), STEP(dealloc_pd), STEP(close_it);
	/* What they left is whole: all of it once more, by this thread, with another peer. */
	EQ(write(to_peer[1][1], &done, 1), 1);
	set_up(from_peer[1][0], to_peer[1][1]);
	EQ(read(from_peer[1][0], &done, 1), 1);
	create_ah(), post_ud(), poll_one_cq(), write_rc(), poll_one_cq();
	for (int i = 0; i < 2; i++) {
		OK(kill(peers[i], SIGKILL));
		EQ(waitpid(peers[i], NULL, 0), peers[i]);
	}
	return 0;
}
