/* Memory windows, local invalidation, ATOMIC WRITE and FLUSH. */
#include <sys/mman.h>
#include <unistd.h>
#include "check.h"

#define RW (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

static struct ibv_mr *bindable(struct ibv_pd *pd, struct end *e, int access)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, e->buf, BUF, access | IBV_ACCESS_MW_BIND);
	TRUE(mr != NULL);
	TRUE(mr->lkey != mr->rkey);
	return mr;
}

static struct ibv_mw_bind to(struct ibv_mr *mr, size_t at, size_t len, unsigned int access)
{
	return (struct ibv_mw_bind){ .wr_id = 7, .send_flags = IBV_SEND_SIGNALED,
		.bind_info = { .mr = mr, .addr = (uintptr_t)mr->addr + at, .length = len, .mw_access_flags = access } };
}

/* Posts a WRITE of 8 bytes and returns its status. */
static enum ibv_wc_status write8(struct end *e, uint64_t va, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)e->buf, .length = 8, .lkey = e->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { .remote_addr = va, .rkey = rkey } }, *bad;
	OK(ibv_post_send(e->qp, &wr, &bad));
	return poll_one(e->cq).status;
}

static void type_1(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	struct ibv_mr *mr = bindable(pd, &b, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	TRUE(mw != NULL);
	TRUE(mw->pd == pd && mw->context == pd->context);
	EQ(mw->type, IBV_MW_TYPE_1);
	uint32_t first = mw->rkey;

	struct ibv_mw_bind bind = to(mr, 1024, 64, RW);
	OK(ibv_bind_mw(b.qp, mw, &bind));
	EQ(mw->rkey, ibv_inc_rkey(first));
	struct ibv_wc wc = poll_one(b.cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.opcode, IBV_WC_BIND_MW);
	EQ(wc.wr_id, 7);
	memcpy(a.buf, "window 1", 8);
	EQ(write8(&a, (uintptr_t)b.buf + 1024, mw->rkey), IBV_WC_SUCCESS);
	OK(memcmp(b.buf + 1024, "window 1", 8));

	/* The region stays as long as the window is bound; anew and elsewhere, with addresses from 0 on. */
	REFUSES(ibv_dereg_mr(mr), EBUSY);
	EQ(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE), IBV_REREG_MR_ERR_INPUT);
	EQ(errno, EBUSY);
	bind = to(mr, 2048, 64, RW | IBV_ACCESS_ZERO_BASED);
	OK(ibv_bind_mw(b.qp, mw, &bind));
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	EQ(write8(&a, 56, mw->rkey), IBV_WC_SUCCESS);
	OK(memcmp(b.buf + 2048 + 56, "window 1", 8));

	/* Length 0 unbinds. */
	bind = to(mr, 0, 0, 0);
	OK(ibv_bind_mw(b.qp, mw, &bind));
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	EQ(write8(&a, 0, mw->rkey), IBV_WC_REM_ACCESS_ERR);
	OK(ibv_dereg_mr(mr));

	/* Rights that only regions have mean nothing; a bind is posted, and looks at no handles. */
	mr = bindable(pd, &b, IBV_ACCESS_LOCAL_WRITE);
	struct end c = make_end(pd, IBV_QPT_RC), d = make_end(pd, IBV_QPT_RC);
	connect_ends(&c, &d);
	bind = to(mr, 0, 64, RW | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	mr->handle ^= 0xffff, mw->handle ^= 0xffff;
	OK(ibv_bind_mw(d.qp, mw, &bind));
	mr->handle ^= 0xffff, mw->handle ^= 0xffff;
	EQ(poll_one(d.cq).status, IBV_WC_SUCCESS);
	EQ(write8(&c, (uintptr_t)b.buf, mw->rkey), IBV_WC_SUCCESS);
	bind = to(mr, 0, 0, 0);
	OK(ibv_bind_mw(d.qp, mw, &bind));
	EQ(poll_one(d.cq).status, IBV_WC_SUCCESS);
	OK(ibv_dereg_mr(mr));
	free_end(&c), free_end(&d);

	/* What the call itself refuses. */
	mr = bindable(pd, &a, IBV_ACCESS_LOCAL_WRITE);
	bind = to(mr, 0, 8, 1 << 12);
	REFUSES(ibv_bind_mw(a.qp, mw, &bind), EINVAL);
	REFUSES(mw->context->ops.bind_mw(a.qp, mw, NULL), EINVAL);
	REFUSES(mw->context->ops.bind_mw(NULL, mw, &bind), EINVAL);
	REFUSES(mw->context->ops.bind_mw(a.qp, (struct ibv_mw *)mr, &bind), EINVAL);
	IS_NULL(ibv_alloc_mw(pd, 3), EINVAL);
	IS_NULL(pd->context->ops.alloc_mw(NULL, IBV_MW_TYPE_1), EINVAL);
	mw->handle ^= 0xffff;
	REFUSES(ibv_dealloc_mw(mw), ENOENT);
	mw->handle ^= 0xffff;
	OK(ibv_dealloc_mw(mw));
	REFUSES(pd->context->ops.dealloc_mw(mw), EINVAL);
	OK(ibv_dereg_mr(mr));
	free_end(&a), free_end(&b);
}

static int post_bind(struct end *e, struct ibv_mw *mw, uint32_t rkey, struct ibv_mw_bind_info info)
{
	struct ibv_send_wr wr = { .wr_id = 9, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
		.bind_mw = { .mw = mw, .rkey = rkey, .bind_info = info } }, *bad = NULL;
	int ret = ibv_post_send(e->qp, &wr, &bad);
	TRUE(ret == 0 || bad == &wr);
	return ret;
}

static int post_inv(struct end *e, enum ibv_wr_opcode opcode, uint32_t rkey)
{
	struct ibv_send_wr wr = { .opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey }, *bad;
	return ibv_post_send(e->qp, &wr, &bad);
}

static void type_2(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	struct ibv_mr *mr = bindable(pd, &b, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2), *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	TRUE(mw && one);
	struct ibv_mw_bind bind = to(mr, 0, 64, RW);
	EQ(ibv_bind_mw(b.qp, mw, &bind), EINVAL);
	REFUSES(post_bind(&b, one, one->rkey, bind.bind_info), EINVAL);
	REFUSES(post_bind(&b, NULL, 0, bind.bind_info), EINVAL);

	uint32_t key = ibv_inc_rkey(mw->rkey);
	OK(post_bind(&b, mw, key, bind.bind_info));
	EQ(poll_one(b.cq).opcode, IBV_WC_BIND_MW);
	EQ(write8(&a, (uintptr_t)b.buf, key), IBV_WC_SUCCESS);
	/* The peer takes it back. */
	OK(post_recv(&b, 1, 16));
	OK(post_inv(&a, IBV_WR_SEND_WITH_INV, key));
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	struct ibv_wc wc = poll_one(b.cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	TRUE(wc.wc_flags & IBV_WC_WITH_INV);
	EQ(wc.invalidated_rkey, key);
	/* Bound again, and taken back here; the region is free then. Of the key asked for the low 8 bits count; `mw` has what became of it. */
	key = ibv_inc_rkey(key);
	mr->handle ^= 0xffff, mw->handle ^= 0xffff;
	bind.bind_info.mw_access_flags |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
	OK(post_bind(&b, mw, (key & 0xff) | 0x12345600, bind.bind_info));
	EQ(mw->rkey, key);
	mr->handle ^= 0xffff, mw->handle ^= 0xffff;
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	EQ(write8(&a, (uintptr_t)b.buf, key), IBV_WC_SUCCESS);
	OK(post_inv(&b, IBV_WR_LOCAL_INV, key));
	EQ(poll_one(b.cq).opcode, IBV_WC_LOCAL_INV);
	EQ(write8(&a, (uintptr_t)b.buf, key), IBV_WC_REM_ACCESS_ERR);
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_mw(one));
	free_end(&a), free_end(&b);

	/* What is found out when the request's turn has come. */
	struct ibv_pd *other = ibv_alloc_pd(pd->context);
	struct {
		struct ibv_pd *pd;
		int mr_access;
		size_t at, len;
	} bad[] = {
		{ other, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND, 0, 8 },
		{ pd, IBV_ACCESS_LOCAL_WRITE, 0, 8 },
		{ pd, IBV_ACCESS_MW_BIND, 0, 8 },
		{ pd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND, BUF, 8 },
		{ pd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND, 0, (size_t)-1 },
		{ pd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND, 0, 0 },
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
		connect_ends(&a, &b);
		mr = ibv_reg_mr(bad[i].pd, b.buf, BUF, bad[i].mr_access);
		TRUE(mr != NULL);
		OK(post_bind(&b, mw, mw->rkey, to(mr, bad[i].at, bad[i].len, RW).bind_info));
		EQ(poll_one(b.cq).status, IBV_WC_MW_BIND_ERR);
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		OK(ibv_query_qp(b.qp, &attr, IBV_QP_STATE, &init));
		EQ(attr.qp_state, IBV_QPS_ERR);
		OK(ibv_dereg_mr(mr));
		free_end(&a), free_end(&b);
	}
	a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	OK(post_inv(&a, IBV_WR_LOCAL_INV, a.mr->rkey));
	EQ(poll_one(a.cq).status, IBV_WC_MW_BIND_ERR);
	free_end(&a), free_end(&b);
	/* A region of the verbs cannot be invalidated by a peer. */
	a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	OK(post_recv(&b, 1, 16));
	OK(post_inv(&a, IBV_WR_SEND_WITH_INV, b.mr->rkey));
	/* The receive fails, and the sender is not told: its retries run out. */
	EQ(poll_one(b.cq).status, IBV_WC_LOC_ACCESS_ERR);
	EQ(poll_one(a.cq).status, IBV_WC_RETRY_EXC_ERR);
	free_end(&a), free_end(&b);

	/* A window dies with its queue pair, and with its own end; a PD stays while it has windows. */
	a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	mr = bindable(pd, &b, IBV_ACCESS_LOCAL_WRITE);
	OK(post_bind(&b, mw, mw->rkey, to(mr, 0, 8, RW).bind_info));
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	REFUSES(ibv_dereg_mr(mr), EBUSY);
	OK(ibv_destroy_qp(b.qp));
	b.qp = make_qp(pd, b.cq, IBV_QPT_RC, NULL, 0);
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_mw(mw));
	mw = ibv_alloc_mw(other, IBV_MW_TYPE_2);
	TRUE(mw != NULL);
	REFUSES(ibv_dealloc_pd(other), EBUSY);
	OK(ibv_dealloc_mw(mw));
	OK(ibv_dealloc_pd(other));
	free_end(&a), free_end(&b);
}

static struct ibv_qp_ex *make_ex(struct ibv_pd *pd, struct ibv_cq *cq, uint64_t ops)
{
	struct ibv_qp_init_attr_ex ex = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = ops };
	struct ibv_qp *qp = ibv_create_qp_ex(pd->context, &ex);
	TRUE(qp != NULL);
	return ibv_qp_to_qp_ex(qp);
}

/* A connection whose first end builds its requests call by call. */
static struct ibv_qp_ex *build(struct ibv_pd *pd, struct end *a, struct end *b, uint64_t ops, int access)
{
	*a = make_end(pd, IBV_QPT_RC), *b = make_end(pd, IBV_QPT_RC);
	OK(ibv_destroy_qp(a->qp));
	struct ibv_qp_ex *qx = make_ex(pd, a->cq, ops);
	a->qp = &qx->qp_base;
	connect_ends(a, b);
	struct ibv_qp_attr attr = { .qp_access_flags = access };
	OK(ibv_modify_qp(b->qp, &attr, IBV_QP_ACCESS_FLAGS));
	return qx;
}

static void built_call_by_call(struct ibv_pd *pd)
{
	struct end a, b;
	uint64_t ops = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
	struct ibv_qp_ex *qx = build(pd, &a, &b, ops, IBV_ACCESS_REMOTE_WRITE);
	struct ibv_mr *mr = bindable(pd, &a, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind_info info = to(mr, 0, 64, RW).bind_info;
	ibv_wr_start(qx);
	qx->wr_id = 1;
	qx->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_bind_mw(qx, mw, mw->rkey, &info);
	qx->wr_id = 2;
	qx->wr_flags |= IBV_SEND_FENCE;
	ibv_wr_local_inv(qx, mw->rkey);
	OK(ibv_wr_complete(qx));
	EQ(poll_one(a.cq).opcode, IBV_WC_BIND_MW);
	EQ(poll_one(a.cq).opcode, IBV_WC_LOCAL_INV);
	/* They have no data, and need their operands. */
	ibv_wr_start(qx);
	ibv_wr_local_inv(qx, mw->rkey);
	ibv_wr_set_sge(qx, mr->lkey, (uintptr_t)a.buf, 8);
	REFUSES(ibv_wr_complete(qx), EINVAL);
	ibv_wr_start(qx);
	ibv_wr_bind_mw(qx, mw, mw->rkey, NULL);
	REFUSES(ibv_wr_complete(qx), EINVAL);
	OK(ibv_dealloc_mw(mw));
	OK(ibv_dereg_mr(mr));
	free_end(&a), free_end(&b);
}

static void atomic_write(struct ibv_pd *pd)
{
	struct end a, b;
	struct ibv_qp_ex *qx = build(pd, &a, &b, IBV_QP_EX_WITH_ATOMIC_WRITE, IBV_ACCESS_REMOTE_WRITE);
	char word[8] = "at once";
	ibv_wr_start(qx);
	qx->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_atomic_write(qx, b.mr->rkey, (uintptr_t)b.buf + 8, word);
	memset(word, 0, 8);
	OK(ibv_wr_complete(qx));
	struct ibv_wc wc = poll_one(a.cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.opcode, IBV_WC_ATOMIC_WRITE);
	OK(memcmp(b.buf + 8, "at once", 8));
	/* From memory. */
	memcpy(a.buf, "from mr", 8);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_WRITE,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)b.buf, b.mr->rkey } }, *bad;
	OK(ibv_post_send(a.qp, &wr, &bad));
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	OK(memcmp(b.buf, "from mr", 8));
	ibv_wr_start(qx);
	ibv_wr_atomic_write(qx, b.mr->rkey, (uintptr_t)b.buf, NULL);
	REFUSES(ibv_wr_complete(qx), EINVAL);
	/* An address that is not aligned is an invalid request. */
	wr.wr.rdma.remote_addr += 4;
	OK(ibv_post_send(a.qp, &wr, &bad));
	EQ(poll_one(a.cq).status, IBV_WC_REM_INV_REQ_ERR);
	free_end(&a), free_end(&b);
}

static void flush(struct ibv_pd *pd)
{
	/* The header of Debian 12 knows the call no better than by its slot. */
	const uint64_t with_flush = 1 << 11;
	const int global = 1 << 8, persistent = 1 << 9;
	void (*slot)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);
	struct end a, b;
	struct ibv_qp_ex *qx = build(pd, &a, &b, with_flush, global | persistent);
	/* It follows wr_atomic_write. */
	memcpy(&slot, (char *)&qx->wr_atomic_write + sizeof(void *), sizeof slot);
	IS_NULL(ibv_reg_mr(pd, b.buf, BUF, persistent), EINVAL);
	struct ibv_mr *mr = ibv_reg_mr(pd, b.buf, BUF, global);
	TRUE(mr != NULL);
	ibv_wr_start(qx);
	qx->wr_flags = IBV_SEND_SIGNALED;
	slot(qx, mr->rkey, (uintptr_t)b.buf, 64, 1, 0);
	slot(qx, mr->rkey, 0, 0, 1, 1);
	OK(ibv_wr_complete(qx));
	for (int i = 0; i < 2; i++) {
		struct ibv_wc wc = poll_one(a.cq);
		EQ(wc.status, IBV_WC_SUCCESS);
		EQ(wc.opcode, 8 /* IBV_WC_FLUSH */);
	}
	struct { size_t len; uint8_t type, level; } wrong[] = { { 8, 0, 0 }, { 8, 4, 0 }, { 8, 1, 2 }, { 1ul << 32, 1, 0 } };
	for (int i = 0; i < 4; i++) {
		ibv_wr_start(qx);
		slot(qx, mr->rkey, (uintptr_t)b.buf, wrong[i].len, wrong[i].type, wrong[i].level);
		REFUSES(ibv_wr_complete(qx), EINVAL);
	}
	ibv_wr_start(qx);
	slot(qx, mr->rkey, (uintptr_t)b.buf, 8, 2, 0);
	OK(ibv_wr_complete(qx));
	EQ(poll_one(a.cq).status, IBV_WC_REM_ACCESS_ERR);
	OK(ibv_dereg_mr(mr));
	free_end(&a), free_end(&b);
}

/* A mapped file lasts, where the file system does: what was written is there. */
static void flush_to_a_file(struct ibv_pd *pd)
{
	void (*slot)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);
	FILE *file = fopen("mw.c.flush.tmp", "w+");
	if (!file)
		return;
	OK(unlink("mw.c.flush.tmp"));
	OK(ftruncate(fileno(file), BUF));
	char *map = mmap(NULL, BUF, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
	TRUE(map != MAP_FAILED);
	struct ibv_mr *mr = ibv_reg_mr(pd, map, BUF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | 1 << 9);
	if (!mr) {
		EQ(errno, EINVAL);
		printf("the directory of the test is in memory\n");
	} else {
		struct end a, b;
		struct ibv_qp_ex *qx = build(pd, &a, &b, 1 << 11 | IBV_QP_EX_WITH_RDMA_WRITE,
					     IBV_ACCESS_REMOTE_WRITE | 1 << 9);
		memcpy(&slot, (char *)&qx->wr_atomic_write + sizeof(void *), sizeof slot);
		memcpy(a.buf, "to stay", 8);
		ibv_wr_start(qx);
		qx->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(qx, mr->rkey, (uintptr_t)map);
		ibv_wr_set_sge(qx, a.mr->lkey, (uintptr_t)a.buf, 8);
		slot(qx, mr->rkey, (uintptr_t)map, 8, 2, 0);
		OK(ibv_wr_complete(qx));
		EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
		EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
		char back[8];
		EQ(pread(fileno(file), back, 8, 0), 8);
		OK(memcmp(back, "to stay", 8));
		free_end(&a), free_end(&b);
		OK(ibv_dereg_mr(mr));
	}
	munmap(map, BUF);
	fclose(file);
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_device_attr_ex attr;
	OK(ibv_query_device_ex(ctx, NULL, &attr));
	unsigned int caps = attr.orig_attr.device_cap_flags;
	TRUE(caps & IBV_DEVICE_MEM_WINDOW);
	TRUE(caps & IBV_DEVICE_MEM_WINDOW_TYPE_2B && !(caps & IBV_DEVICE_MEM_WINDOW_TYPE_2A));
	TRUE(caps & IBV_DEVICE_MEM_MGT_EXTENSIONS);
	TRUE(attr.orig_attr.max_mw > 0);
	EQ(attr.device_cap_flags_ex >> 38, 7);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	type_1(pd);
	type_2(pd);
	built_call_by_call(pd);
	atomic_write(pd);
	flush(pd);
	flush_to_a_file(pd);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
