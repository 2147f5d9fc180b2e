/** What changes in an import or export, or prevents it. */
import type { ImportFinding } from '../api/types';
import { sentence } from '../parts/basics';
import { Status } from '../parts/status';

export function Findings({ findings, caption }: { findings: ImportFinding[]; caption: string }) {
  // What refuses the import comes first.
  const sorted = [...findings].sort(
    (a, b) => Number(b.refuses === true) - Number(a.refuses === true),
  );
  return (
    <table class="plain checks">
      <caption class="unseen">{caption}</caption>
      <thead>
        <tr>
          <th scope="col">Effect</th>
          <th scope="col">Part</th>
          <th scope="col">Why</th>
        </tr>
      </thead>
      <tbody>
        {sorted.map(({ what, why, refuses }, at) => (
          <tr key={`${what} ${at}`}>
            <td>
              <Status
                look={
                  refuses
                    ? { tone: 'bad', shape: 'cross', text: 'refused' }
                    : { tone: 'warn', shape: 'triangle', text: 'changes' }
                }
              />
            </td>
            <th scope="row">{what}</th>
            <td>{sentence(why)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
