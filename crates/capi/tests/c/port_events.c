/* Events of a port that a script of faults asks for: they name the port, and nothing else changes. */
#include "check.h"

static void next_is(struct ibv_context *ctx, enum ibv_event_type type, int port)
{
	struct ibv_async_event event;
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, type);
	EQ(event.element.port_num, port);
	ibv_ack_async_event(&event);
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_port_attr before, after;
	OK(ibv_query_port(ctx, 1, &before));
	next_is(ctx, IBV_EVENT_LID_CHANGE, 1);
	next_is(ctx, IBV_EVENT_PKEY_CHANGE, 1);
	next_is(ctx, IBV_EVENT_SM_CHANGE, 1);
	next_is(ctx, IBV_EVENT_CLIENT_REREGISTER, 1);
	next_is(ctx, IBV_EVENT_GID_CHANGE, 1);
	OK(ibv_query_port(ctx, 1, &after));
	EQ(after.state, IBV_PORT_ACTIVE);
	EQ(after.lid, before.lid);
	OK(ibv_close_device(ctx));
	return 0;
}
