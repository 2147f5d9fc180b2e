//! Implements `godwit control limits` and `godwit control host set`.

use godwit_api::control::{
    HostMoves, LinkMoves, ManagerClient, MoveLimits, UpdateHost, UpdateLimits,
};
use godwit_types::BitRate;

use crate::args::{HostChanges, LimitsCommand, SetHostArgs, SetLimitsArgs, Setting};
use crate::exit::Failure;
use crate::output::{Output, table};

pub(crate) async fn run(
    command: LimitsCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    let limits = match command {
        LimitsCommand::Show => manager.limits().await?,
        LimitsCommand::Set(options) => manager.update_limits(&request(options)).await?,
    };
    output.result(&limits, || render(&limits))
}

fn request(options: SetLimitsArgs) -> UpdateLimits {
    let SetLimitsArgs { out, into, per_datastore, in_all, datastores } = options;
    let datastores = datastores.into_iter().map(|(path, limit)| (path, limit.value()));
    UpdateLimits {
        out_of_host: out.map(Setting::value),
        into_host: into.map(Setting::value),
        per_datastore: per_datastore.map(Setting::value),
        in_all: in_all.map(Setting::value),
        datastores: datastores.collect(),
    }
}

fn render(limits: &MoveLimits) -> String {
    let MoveLimits { out_of_host, into_host, per_datastore, in_all, datastores, hosts, by_link } =
        limits;
    let number = |most: Option<u32>, none: &str| {
        most.map_or_else(|| none.to_owned(), |most| most.to_string())
    };
    let mut rows = vec![
        vec!["in all".to_owned(), number(*in_all, "no limit")],
        vec!["out of a host".to_owned(), number(*out_of_host, "by its link")],
        vec!["into a host".to_owned(), number(*into_host, "by its link")],
        vec!["on a datastore".to_owned(), per_datastore.to_string()],
    ];
    rows.extend(datastores.iter().map(|(path, most)| vec![format!("on {path}"), most.to_string()]));
    let own = hosts.iter().filter(|(_, own)| own.out.is_some() || own.into.is_some());
    for (host, HostMoves { out, into }) in own {
        rows.push(vec![format!("out of {host}"), number(*out, "as for each host")]);
        rows.push(vec![format!("into {host}"), number(*into, "as for each host")]);
    }
    let table = table(&["moves at a time", "most"], &rows);
    let steps: Vec<_> = by_link.iter().map(step).collect();
    format!("{table}\nby a host's link: {}", steps.join(", "))
}

fn step(LinkMoves { bits_per_s, moves }: &LinkMoves) -> String {
    match bits_per_s {
        None => format!("{moves} for an unknown speed"),
        Some(bits) => format!("{moves} from {} Mb/s", bits / 1_000_000),
    }
}

pub(crate) async fn set_host(
    SetHostArgs { name, changes }: SetHostArgs,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    let HostChanges { address, labels, no_labels, link, most_moves } = changes;
    let change = UpdateHost {
        address: address.map(|address| address.to_string()),
        labels: (no_labels || !labels.is_empty()).then(|| labels.into_iter().collect()),
        link_bits_per_s: link.map(|link| link.value().map(BitRate::bits_per_second)),
        most_moves: most_moves.map(Setting::value),
        ..UpdateHost::default()
    };
    let host = manager.update_host(&name, &change).await?;
    output.result(&host, || format!("host {name} is changed"))
}
