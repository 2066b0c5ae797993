/* operations - what no packaged tool posts: a SEND that comes before its receive for certain, immediate data, memory windows,
 * SEND with invalidate, ATOMIC WRITE and FLUSH, between two devices.
 *
 *   operations GID_INDEX [SERVER [-]]   server without, client with an address; TCP port 18515
 *
 * The client does one operation after the other on the server's memory, and the server looks at what came. Status 0 if all
 * was right. FLUSH is left out where the client's library does not have it (rdma-core before 45 on rxe), and with "-" as a
 * third argument: rxe (seen in Linux 6.12) counts the headers of a FLUSH twice in its ICRC, and drops those of others.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SIZE 8192
#define NEED(what, cond)                                                          \
	do {                                                                      \
		if (!(cond)) {                                                    \
			fprintf(stderr, "%d: %s: %s (errno %d)\n", __LINE__, what, #cond, errno); \
			exit(1);                                                  \
		}                                                                 \
	} while (0)

enum { FLUSH_GLOBAL = 1 << 8, WITH_FLUSH = 1 << 11 };

struct side {
	uint32_t qpn, psn, window, region;
	uint64_t va;
	union ibv_gid gid;
};

static struct ibv_qp *qp;
static struct ibv_qp_ex *qx;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static char *buf;
static int peer;

static struct ibv_wc done(void)
{
	struct ibv_wc wc;
	time_t until = time(NULL) + 30;
	int n;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		NEED("a completion", time(NULL) < until);
	NEED("poll", n == 1);
	return wc;
}

static void expect(const char *what, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc = done();
	if (wc.status || wc.opcode != opcode) {
		fprintf(stderr, "%s: %s, opcode %d\n", what, ibv_wc_status_str(wc.status), wc.opcode);
		exit(1);
	}
	printf("%s: ok\n", what);
}

static void swap_words(void *out, void *in, size_t len)
{
	NEED("exchange", write(peer, out, len) == (ssize_t)len);
	for (size_t got = 0; got < len;) {
		ssize_t n = read(peer, (char *)in + got, len - got);
		NEED("exchange", n > 0);
		got += n;
	}
}

static void meet(void)
{
	char out = 0, in;
	swap_words(&out, &in, 1);
}

static void post(struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad;
	wr.send_flags = IBV_SEND_SIGNALED;
	NEED("post", ibv_post_send(qp, &wr, &bad) == 0);
}

static struct ibv_sge part(size_t at, uint32_t len)
{
	return (struct ibv_sge){ .addr = (uintptr_t)buf + at, .length = len, .lkey = mr->lkey };
}

static void one_sided(enum ibv_wr_opcode opcode, uint64_t va, uint32_t rkey, size_t at, uint32_t len)
{
	struct ibv_sge sge = part(at, len);
	post((struct ibv_send_wr){ .opcode = opcode, .sg_list = &sge, .num_sge = 1, .wr.rdma = { va, rkey } });
}

/* Of which the header may know nothing. */
typedef void flush_fn(struct ibv_qp_ex *, uint32_t rkey, uint64_t va, size_t len, uint8_t type, uint8_t level);

/* A message of several packets and one of none. */
static void with_immediate(struct side *to)
{
	for (uint32_t i = 0; i < 4; i++) {
		uint32_t len = i % 2 ? 0 : 3000;
		int is_write = i / 2;
		struct ibv_sge sge = part(0, len);
		memset(buf, '0' + i, len);
		post((struct ibv_send_wr){ .opcode = is_write ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM,
			.sg_list = &sge, .num_sge = len ? 1 : 0, .imm_data = htonl(0xabcd0000 + i),
			.wr.rdma = { to->va, to->region } });
		expect(is_write ? "WRITE with immediate" : "SEND with immediate", is_write ? IBV_WC_RDMA_WRITE : IBV_WC_SEND);
		meet();
	}
	memset(buf, 0, SIZE);
	meet();
}

static void receive(size_t at, uint32_t len)
{
	struct ibv_sge sge = part(at, len);
	struct ibv_recv_wr rwr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	NEED("receive", ibv_post_recv(qp, &rwr, &bad) == 0);
}

static void takes_immediate(void)
{
	for (uint32_t i = 0; i < 4; i++) {
		struct ibv_wc wc = done();
		uint32_t len = i % 2 ? 0 : 3000;
		int is_write = i / 2;
		size_t at = is_write ? 0 : 4096;
		NEED("receive", wc.status == IBV_WC_SUCCESS);
		NEED("its kind", wc.opcode == (is_write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV));
		NEED("its length", wc.byte_len == len);
		NEED("the immediate", wc.wc_flags & IBV_WC_WITH_IMM && wc.imm_data == htonl(0xabcd0000 + i));
		for (uint32_t n = 0; n < len; n++)
			NEED("the data", buf[at + n] == (char)('0' + i));
		meet();
	}
	memset(buf, 0, SIZE);
	meet();
}

/* Whose receive is a second late: in that time the server must have refused the SEND, and the client repeats it. */
static void before_its_receive(void)
{
	struct ibv_sge sge = part(0, 64);
	post((struct ibv_send_wr){ .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1 });
	meet();
	expect("SEND before its receive", IBV_WC_SEND);
	meet();
}

static void takes_late(void)
{
	meet();
	sleep(1);
	receive(4096, 4096);
	struct ibv_wc wc = done();
	NEED("the late receive", wc.status == IBV_WC_SUCCESS && wc.byte_len == 64);
	for (int i = 0; i < 4; i++)
		receive(4096, 4096);
	meet();
}

static void client(struct side *to, int has_flush)
{
	before_its_receive();
	with_immediate(to);
	strcpy(buf, "through the window");
	one_sided(IBV_WR_RDMA_WRITE, to->va + 1024, to->window, 0, 1024);
	expect("WRITE to the window", IBV_WC_RDMA_WRITE);
	one_sided(IBV_WR_RDMA_READ, to->va + 1024, to->window, 4096, 1024);
	expect("READ from the window", IBV_WC_RDMA_READ);
	NEED("what was read", !strcmp(buf + 4096, "through the window"));
	ibv_wr_start(qx);
	qx->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_atomic_write(qx, to->window, to->va + 2040, "8 bytes");
	NEED("atomic write", ibv_wr_complete(qx) == 0);
	expect("ATOMIC WRITE to the window", IBV_WC_ATOMIC_WRITE);
	for (int level = 0; has_flush && level < 2; level++) {
		flush_fn *flush;
		memcpy(&flush, (char *)&qx->wr_atomic_write + sizeof(void *), sizeof flush);
		ibv_wr_start(qx);
		flush(qx, to->region, to->va, 2048, 1, level);
		NEED("flush", ibv_wr_complete(qx) == 0);
		expect(level ? "FLUSH of the region" : "FLUSH of a range", 8);
	}
	meet();
	struct ibv_sge sge = part(0, 64);
	post((struct ibv_send_wr){ .opcode = IBV_WR_SEND_WITH_INV, .sg_list = &sge, .num_sge = 1, .invalidate_rkey = to->window });
	expect("SEND with invalidate", IBV_WC_SEND);
	meet();
	one_sided(IBV_WR_RDMA_WRITE, to->va + 1024, to->window, 0, 8);
	struct ibv_wc wc = done();
	NEED("a window that is closed", wc.status == IBV_WC_REM_ACCESS_ERR);
	printf("WRITE to what was the window: refused\n");
	meet();
}

static void server(uint32_t window)
{
	takes_late();
	takes_immediate();
	receive(4096, 64);
	meet();
	NEED("what was written", !strcmp(buf + 1024, "through the window"));
	NEED("what was written at once", !strcmp(buf + 2040, "8 bytes"));
	meet();
	struct ibv_wc wc = done();
	NEED("receive", wc.status == IBV_WC_SUCCESS);
	/* rxe's library does not pass the flag on. */
	if (wc.wc_flags & IBV_WC_WITH_INV)
		NEED("the invalidated key", wc.invalidated_rkey == window);
	printf("received%s\n", wc.wc_flags & IBV_WC_WITH_INV ? " with an invalidation" : ", flags unknown");
	meet();
}

int main(int argc, char **argv)
{
	NEED("usage: operations GID_INDEX [SERVER [-]]", argc >= 2 && argc <= 4);
	setvbuf(stdout, NULL, _IOLBF, 0);
	int gid_index = atoi(argv[1]), is_client = argc >= 3;
	struct ibv_device **list = ibv_get_device_list(NULL);
	NEED("a device", list && list[0]);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	buf = aligned_alloc(4096, SIZE);
	memset(buf, 0, SIZE);
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	mr = ibv_reg_mr(pd, buf, SIZE, access | IBV_ACCESS_MW_BIND | FLUSH_GLOBAL);
	NEED("region", mr);
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 16 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE | WITH_FLUSH };
	qp = ibv_create_qp_ex(ctx, &init);
	int has_flush = qp != NULL && argc != 4;
	if (!qp) {
		init.send_ops_flags = IBV_QP_EX_WITH_ATOMIC_WRITE;
		qp = ibv_create_qp_ex(ctx, &init);
	}
	NEED("queue pair", qp);
	qx = ibv_qp_to_qp_ex(qp);

	int tcp = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(18515) };
	setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	if (is_client) {
		NEED("address", inet_pton(AF_INET, argv[2], &at.sin_addr) == 1);
		for (int i = 0; connect(tcp, (void *)&at, sizeof at); i++) {
			NEED("connect", i < 50);
			usleep(200000);
		}
		peer = tcp;
	} else {
		NEED("bind", bind(tcp, (void *)&at, sizeof at) == 0 && listen(tcp, 1) == 0);
		peer = accept(tcp, NULL, NULL);
		NEED("accept", peer >= 0);
	}

	struct side me = { .qpn = qp->qp_num, .psn = 77, .region = mr->rkey, .va = (uintptr_t)buf }, other;
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	NEED("window", mw);
	me.window = ibv_inc_rkey(mw->rkey);
	NEED("gid", ibv_query_gid(ctx, 1, gid_index, &me.gid) == 0);
	swap_words(&me, &other, sizeof me);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = access | FLUSH_GLOBAL };
	NEED("INIT", ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = other.qpn,
		.rq_psn = other.psn, .max_dest_rd_atomic = 4, .min_rnr_timer = 18,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = other.gid, .sgid_index = gid_index, .hop_limit = 64 } } };
	NEED("RTR", ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
		.sq_psn = me.psn, .max_rd_atomic = 4 };
	NEED("RTS", ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);

	struct ibv_mw_bind_info info = { .mr = mr, .addr = (uintptr_t)buf + 1024, .length = 1024,
		.mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	post((struct ibv_send_wr){ .opcode = IBV_WR_BIND_MW, .bind_mw = { .mw = mw, .rkey = me.window, .bind_info = info } });
	expect("bind", IBV_WC_BIND_MW);
	meet();
	if (is_client)
		client(&other, has_flush);
	else
		server(me.window);
	meet();
	return 0;
}
