//! A store of the host in which other processes of the user write anything. No reader panics, loops or believes the
//! impossible.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use anyverbs_net::host::{Journal, PAYLOAD_LEN};
use anyverbs_net::{ServiceAddress, Services, Slot};

use super::input::Input;

const MAX_STEPS: usize = 128;
/// The range in which records of the journal are looked for: two sections of it.
const JOURNAL: u64 = 2 * 4096 * 64;

/// Runs one input.
pub fn run(input: &[u8]) {
    // A search for a slot takes more time than all of this.
    static SERVICES: OnceLock<Mutex<Arc<Services>>> = OnceLock::new();
    let services = SERVICES.get_or_init(|| {
        let name = format!("fuzz-{}", std::process::id());
        Mutex::new(Services::new(Arc::new(Slot::claim(&name).expect("a slot"))))
    });
    let services = &*services.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut input = Input(input);
    let mut held = Vec::new();
    let mut taken = Vec::new();
    let journal = Journal::join(services.store()).expect("a journal");
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        step(&mut input, services, &journal, &mut held, &mut taken);
    }
}

fn step(
    input: &mut Input<'_>,
    services: &Arc<Services>,
    journal: &Arc<Journal>,
    held: &mut Vec<anyverbs_net::Reservation>,
    taken: &mut Vec<anyverbs_net::host::Abandoned>,
) {
    let address = IpAddr::from(Ipv4Addr::from_bits(u32::from(input.byte()) & 3));
    let at =
        input.one_of(&[ServiceAddress::Any, ServiceAddress::AnyV6, ServiceAddress::Ip(address)]);
    let service = u64::from(input.byte()) & 7;
    let store = services.store();
    match input.byte() % 12 {
        0..=3 => {
            // Mostly where entries of these services are, or sections, or headers.
            let place = match input.byte() & 3 {
                0 => 16 + 8 * u64::from(input.byte()),
                1 => 2048 + 8 * u64::from(input.byte()),
                2 => 4096 + 8 * u64::from(input.word() % 1024),
                _ => store.place_of(service) + 8 * u64::from(input.byte() & 15),
            };
            let words = [input.word(), input.word(), input.word(), input.word()];
            let word = words.into_iter().fold(0, |word, part| word << 16 | u64::from(part));
            store.overwrite(place, word);
        }
        4 => store.overwrite_record(u64::from(input.word()) * 8 % JOURNAL, input.byte()),
        5 => {
            let holder = services.holder(service, address);
            assert!(holder.is_none_or(|slot| store.live_slots().contains(&slot)));
        }
        6 => {
            let share = input.byte() & 1 == 0;
            held.extend(services.reserve(service, at, share));
            held.extend(services.reserve_ephemeral(u64::from, at, share).map(|(_, held)| held));
        }
        7 => {
            if let Some(one) = held.pop()
                && input.byte() & 1 == 0
            {
                let _ = one.make_exclusive();
            }
        }
        8 => {
            let _ = services.leave(service, Duration::from_secs(1));
            let _ = services.was_left(service);
            assert!(services.lingering().len() < 255);
        }
        9 => {
            let said = store.share(u128::from(service) << 90);
            if said.is_ok() {
                let _ = store.sharers(u128::from(service) << 90);
            }
        }
        10 => {
            let _ = Journal::successors(store);
            let _ = journal.has_abandoned();
            taken.extend(journal.take_abandoned(1).unwrap_or_default());
            taken.truncate(3);
        }
        _ => {
            if let Ok(mut section) = journal.section()
                && let Some(at) = section.add(&[input.byte(); PAYLOAD_LEN])
            {
                section.remove(at);
            }
        }
    }
}
