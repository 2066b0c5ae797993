/* The examples of the manual pages that the requirements come from, statement by statement: ibv_create_qp with ibv_destroy_qp,
 * and ibv_create_ah with ibv_destroy_ah, by the LID of a port (S1.7, S2.1, S3.1). */
#include "check.h"

static int queue_pair(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp *qp;
	struct ibv_qp_init_attr qp_init_attr;

	memset(&qp_init_attr, 0, sizeof(qp_init_attr));

	qp_init_attr.send_cq = cq;
	qp_init_attr.recv_cq = cq;
	qp_init_attr.qp_type = IBV_QPT_RC;
	qp_init_attr.cap.max_send_wr = 2;
	qp_init_attr.cap.max_recv_wr = 2;
	qp_init_attr.cap.max_send_sge = 1;
	qp_init_attr.cap.max_recv_sge = 1;

	qp = ibv_create_qp(pd, &qp_init_attr);
	if (!qp) {
		fprintf(stderr, "Error, ibv_create_qp() failed\n");
		return -1;
	}

	if (ibv_destroy_qp(qp)) {
		fprintf(stderr, "Error, ibv_destroy_qp() failed\n");
		return -1;
	}
	return 0;
}

static int address_handle(struct ibv_pd *pd, uint16_t dlid, uint8_t sl, uint8_t port)
{
	struct ibv_ah *ah;
	struct ibv_ah_attr ah_attr;

	memset(&ah_attr, 0, sizeof(ah_attr));

	ah_attr.is_global = 0;
	ah_attr.dlid = dlid;
	ah_attr.sl = sl;
	ah_attr.src_path_bits = 0;
	ah_attr.port_num = port;

	ah = ibv_create_ah(pd, &ah_attr);
	if (!ah) {
		fprintf(stderr, "Error, ibv_create_ah() failed\n");
		return -1;
	}

	if (ibv_destroy_ah(ah)) {
		fprintf(stderr, "Error, ibv_destroy_ah() failed\n");
		return -1;
	}
	return 0;
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 4, NULL, NULL, 0);
	struct ibv_port_attr port;
	TRUE(pd && cq);
	OK(ibv_query_port(ctx, 1, &port));
	OK(queue_pair(pd, cq));
	OK(address_handle(pd, port.lid, 0, 1));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
