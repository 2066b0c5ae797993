/* Of sequence.c: the work requests by functions, and the calls that programs make less often. */

/* The headers of rdma-core 44 do not have completion counters. */
struct comp_cntr;
struct comp_cntr_attr { uint32_t comp_mask, type, flags; };
struct attach_attr { uint32_t comp_mask, op_mask; };
struct comp_cntr *ibv_create_comp_cntr(struct ibv_context *, struct comp_cntr_attr *);
int ibv_destroy_comp_cntr(struct comp_cntr *);
int ibv_qp_attach_comp_cntr(struct ibv_qp *, struct comp_cntr *, struct attach_attr *);
int ibv_set_comp_cntr(struct comp_cntr *, uint64_t), ibv_inc_err_comp_cntr(struct comp_cntr *, uint64_t);
int ibv_read_comp_cntr(struct comp_cntr *, uint64_t *);

/* One request by the functions; those that the queue pair was not made with are not there. */
static int add_request(struct ibv_qp_ex *ex, struct ibv_mr *remote)
{
	uint32_t rkey = remote ? remote->rkey : (uint32_t)next();
	uint64_t at = remote ? (uintptr_t)remote->addr + below(64) * 8 : next();
	ex->wr_id = next();
	ex->wr_flags = once_in(20) ? (unsigned)next() : below(16) & ~(unsigned)IBV_SEND_INLINE;
	switch (below(12)) {
	case 0: if (ex->wr_send_imm) return ibv_wr_send_imm(ex, 7), 1; break;
	case 1: if (ex->wr_rdma_write) return ibv_wr_rdma_write(ex, rkey, at), 1; break;
	case 2: if (ex->wr_rdma_write_imm) return ibv_wr_rdma_write_imm(ex, rkey, at, 9), 1; break;
	case 3: if (ex->wr_rdma_read) return ibv_wr_rdma_read(ex, rkey, at), 1; break;
	case 4: if (ex->wr_atomic_fetch_add) return ibv_wr_atomic_fetch_add(ex, rkey, at, 1), 1; break;
	case 5: if (ex->wr_atomic_cmp_swp) return ibv_wr_atomic_cmp_swp(ex, rkey, at, 0, 1), 1; break;
	case 6: if (ex->wr_send_inv) return ibv_wr_send_inv(ex, (uint32_t)next()), 1; break;
	case 7: if (ex->wr_local_inv) return ibv_wr_local_inv(ex, (uint32_t)next()), 0; break;
	case 8: if (ex->wr_atomic_write) return ibv_wr_atomic_write(ex, rkey, at, arena), 0; break;
	case 9:
		if (ex->wr_bind_mw && mws.count && remote) {
			struct ibv_mw_bind_info info = { remote, (uintptr_t)remote->addr, below(5000), (unsigned)random_access() };
			return ibv_wr_bind_mw(ex, any(&mws), (uint32_t)next(), &info), 0;
		}
		break;
	case 10: if (ex->wr_send_tso) return ibv_wr_send_tso(ex, arena, (uint16_t)below(100), (uint16_t)next()), 1; break;
	}
	if (!ex->wr_send)
		return -1;
	ibv_wr_send(ex);
	return 1;
}

static void send_by_functions(void)
{
	struct ibv_qp *qp = any(&qps);
	struct ibv_qp_ex *ex = qp ? ibv_qp_to_qp_ex(qp) : NULL;
	if (!ex)
		return;
	ibv_wr_start(ex);
	for (uint32_t i = below(5); i > 0; i--) {
		struct ibv_sge list[3] = { sge(), sge(), sge() };
		struct ibv_data_buf pieces[2] = { { arena, below(100) }, { arena + below(ARENA / 2), below(100) } };
		int has_data = add_request(ex, any(&mrs));
		if (has_data < 0)
			break;
		if (qp->qp_type == IBV_QPT_UD && ex->wr_set_ud_addr && ahs.count)
			ibv_wr_set_ud_addr(ex, any(&ahs), qp->qp_num, 0x1234);
		if (qp->qp_type == IBV_QPT_XRC_SEND && ex->wr_set_xrc_srqn)
			ibv_wr_set_xrc_srqn(ex, (uint32_t)next());
		switch (has_data || once_in(20) ? below(16) : 16) {
		case 0: case 1: ibv_wr_set_inline_data(ex, arena + below(ARENA / 2), below(300)); break;
		case 2: ibv_wr_set_inline_data_list(ex, below(3), pieces); break;
		case 3: case 4: ibv_wr_set_sge_list(ex, once_in(20) ? next() : below(4), list); break;
		case 5: break; /* none was set */
		default: ibv_wr_set_sge(ex, list->lkey, list->addr, list->length); break;
		case 16: break;
		}
	}
	if (once_in(8))
		ibv_wr_abort(ex);
	else
		posted += !ibv_wr_complete(ex);
}

static void make_comp_cntr(void)
{
	struct comp_cntr_attr init = { .comp_mask = once_in(20), .type = below(3), .flags = once_in(20) };
	struct attach_attr attach = { .comp_mask = once_in(20), .op_mask = once_in(8) ? (uint32_t)next() : below(64) };
	uint64_t value;
	if (has_room(&comp_cntrs))
		add(&comp_cntrs, ibv_create_comp_cntr(context, &init));
	if (!comp_cntrs.count)
		return;
	if (qps.count)
		ibv_qp_attach_comp_cntr(any(&qps), any(&comp_cntrs), &attach);
	ibv_set_comp_cntr(any(&comp_cntrs), next());
	ibv_inc_err_comp_cntr(any(&comp_cntrs), next());
	CHECK(ibv_read_comp_cntr(any(&comp_cntrs), &value) == 0);
}

static void change_tags(struct ibv_srq *srq)
{
	static __thread uint32_t handle;
	struct ibv_sge one = sge();
	struct ibv_ops_wr op = { .wr_id = next(), .opcode = below(once_in(20) ? 9 : 3), .flags = (int)below(4) }, *bad;
	op.tm.unexpected_cnt = below(10);
	op.tm.handle = once_in(4) ? (uint32_t)next() : handle;
	op.tm.add.sg_list = &one;
	op.tm.add.num_sge = once_in(20) ? -1 : 1;
	op.tm.add.tag = below(4), op.tm.add.mask = once_in(4) ? next() : 3;
	if (!ibv_post_srq_ops(srq, &op, &bad) && op.opcode == IBV_WR_TAG_ADD)
		handle = op.tm.handle;
}

/* What is made here and goes again at once. */
static void come_and_go(void)
{
	struct ibv_mr *mr = any(&mrs);
	struct ibv_mr *null = pds.count ? ibv_alloc_null_mr(any(&pds)) : NULL;
	if (null)
		CHECK(ibv_dereg_mr(null) == 0);
	if (mr) {
		struct ibv_mr *again = ibv_import_mr(mr->pd, once_in(4) ? (uint32_t)next() : mr->handle);
		if (again)
			ibv_unimport_mr(again);
	}
	struct ibv_context *other = ibv_import_device(once_in(4) ? -1 : dup(context->cmd_fd));
	if (other) {
		struct ibv_pd *pd = pds.count ? ibv_import_pd(other, ((struct ibv_pd *)any(&pds))->handle) : NULL;
		if (pd)
			ibv_unimport_pd(pd);
		CHECK(ibv_close_device(other) == 0);
	}
	struct ibv_wc wc = { .wc_flags = (unsigned)next() & 0xff, .sl = (uint8_t)next() };
	struct ibv_ah *ah = pds.count ? ibv_create_ah_from_wc(any(&pds), &wc, (struct ibv_grh *)(arena + below(ARENA / 2)), 1) : NULL;
	if (ah)
		CHECK(ibv_destroy_ah(ah) == 0);
}

static void call_rarely(void)
{
	struct ibv_qp *qp = any(&qps);
	struct ibv_cq *cq = any_cq();
	struct ibv_sge list[2] = { sge(), sge() };
	switch (below(10)) {
	case 0: come_and_go(); break;
	case 1:
		if (cq) {
			struct ibv_modify_cq_attr attr = { .attr_mask = below(4), .moderate = { (uint16_t)below(9), (uint16_t)below(99) } };
			ibv_modify_cq(cq, &attr);
		}
		break;
	case 2: if (pds.count) ibv_advise_mr(any(&pds), below(4), below(4), list, below(3)); break;
	case 3:
		if (qp) {
			struct ibv_qp_rate_limit_attr limit = { once_in(2) ? 0 : 1000000 + below(1000), below(5000), (uint16_t)below(2000), once_in(20) };
			ibv_modify_qp_rate_limit(qp, &limit);
		}
		break;
	case 4:
		if (qp) {
			struct ibv_ece ece = { 0 };
			ibv_query_qp_data_in_order(qp, below(16), below(3));
			ibv_query_ece(qp, &ece);
			ibv_set_ece(qp, &ece);
		}
		break;
	case 5: case 6: if (srqs.count) change_tags(any(&srqs)); break;
	case 7:
		if (wqs.count) {
			struct ibv_recv_wr wr = { .sg_list = list, .num_sge = (int)below(3) }, *bad;
			ibv_post_wq_recv(any(&wqs), &wr, &bad);
		}
		break;
	case 8:
		if (qp && mws.count && mrs.count) {
			struct ibv_mr *mr = any(&mrs);
			struct ibv_mw_bind bind = { next(), below(16), { mr, (uintptr_t)mr->addr, below(5000), (unsigned)random_access() } };
			ibv_bind_mw(qp, any(&mws), &bind);
		}
		break;
	case 9:
		if (has_room(&qps) && xrcds.count && qp) {
			struct ibv_qp_open_attr attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
							 .qp_num = qp->qp_num, .xrcd = any(&xrcds), .qp_type = IBV_QPT_XRC_RECV };
			add(&qps, ibv_open_qp(context, &attr));
		}
		if (counters.count && flows.count) {
			struct ibv_counter_attach_attr attr = { .counter_desc = below(3), .index = below(4) };
			ibv_attach_counters_point_flow(any(&counters), &attr, any(&flows));
		}
		break;
	}
}
